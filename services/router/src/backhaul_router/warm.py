"""What makes a turn warm, and who holds what a pointer names."""

from collections.abc import Sequence
from dataclasses import dataclass

from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import Grant
from backhaul_router.core.nodes import Node, NodeState, NodeTable, Role


@dataclass(frozen=True, slots=True)
class Warm:
    """Granted blocks and the nodes that go with them."""

    grant: Grant
    prefill: Node
    holder: Node
    token_ids: Sequence[int] | None = None
    """All of the prompt, for a prefill engine without the connector: it must be sent exactly these. Else None."""


def holder_of(table: NodeTable, pointer: Pointer) -> Node | None:
    """Returns the node that a pointer names, if it is well and runs that engine."""
    node = table.get(pointer.node_id)
    usable = node is not None and node.role is Role.DECODE and node.state is NodeState.READY
    return node if usable and node is not None and node.engine(pointer.engine_id) else None
