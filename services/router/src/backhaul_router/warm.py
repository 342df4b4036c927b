"""What makes a turn warm, and who holds what a pointer names."""

from collections.abc import Sequence
from dataclasses import dataclass

from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import Grant
from backhaul_router.core.nodes import NodeState, NodeTable, Role
from backhaul_router.core.routing.target import Target


@dataclass(frozen=True, slots=True)
class Warm:
    """Granted blocks and the engines that go with them."""

    grant: Grant
    prefill: Target
    holder: Target
    token_ids: Sequence[int] | None = None
    """All of the prompt, for a prefill engine without the connector: it must be sent exactly these. Else None."""
    origin: str = ""
    """The `traceparent` of the turn that left the blocks; empty when it is not known."""


def holder_of(table: NodeTable, pointer: Pointer) -> Target | None:
    """Returns the engine that a pointer names, if its node is well and runs it."""
    node = table.get(pointer.node_id)
    if node is None or node.role is not Role.DECODE or node.state is not NodeState.READY:
        return None
    engine = node.engine(pointer.engine_id)
    return Target(node, engine) if engine else None
