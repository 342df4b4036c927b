"""Order of the messages in a node's join stream and in an engine's publish stream.

    join:     join, then keep_alive and update in any order, then leave
    publish:  open, then batches

Numbers (sequence, nonce) increase from message to message. Anything else is an InvalidArgumentError.
"""

from dataclasses import dataclass, replace

from backhaul_common.errors import InvalidArgumentError
from backhaul_registry.core.model import Node, Pointer


@dataclass(frozen=True, slots=True)
class Increasing:
    """The last number of a stream."""

    last: int | None = None

    def next(self, number: int) -> "Increasing":
        """Accepts a larger number (NOT_INCREASING)."""
        if self.last is not None and number <= self.last:
            raise InvalidArgumentError("NOT_INCREASING", f"{number} does not follow {self.last}")
        return replace(self, last=number)


def check_update(joined: Node, update: Node) -> None:
    """Accepts a record of the same node and session (NODE_CHANGED)."""
    if (joined.node_id, joined.session) != (update.node_id, update.session):
        raise InvalidArgumentError("NODE_CHANGED", "node_id and session must not change within a stream")


def check_owner(node_id: str, engine_id: str, upserts: tuple[Pointer, ...]) -> None:
    """Accepts pointers of the stream's own engine (POINTER_FOREIGN)."""
    for pointer in upserts:
        if (pointer.node_id, pointer.engine_id) != (node_id, engine_id):
            raise InvalidArgumentError("POINTER_FOREIGN", "a stream publishes pointers of its own engine only")
