"""Where a leg can go: one engine of a node."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from backhaul_router.core.nodes import Engine, Node

RANK_HEADER = "x-data-parallel-rank"
"""By which a vLLM server is told which of its engines to use (`entrypoints/generate/base/serving.py`)."""

TargetKey = tuple[str, str]
"""Node id and engine id; the latter is empty for a node that has not named its engines."""


@dataclass(frozen=True, slots=True)
class Target:
    """One engine of a node."""

    node: Node
    engine: Engine | None = None
    """None: the node has not named its engines yet, and the server picks."""
    key: TargetKey = field(init=False, compare=False, repr=False)
    """What figures about this engine are kept under. Another incarnation has another one."""

    def __post_init__(self) -> None:
        """Makes the key: it is asked for far more often than targets are made."""
        object.__setattr__(self, "key", (self.node.node_id, self.engine.engine_id if self.engine else ""))

    @property
    def headers(self) -> dict[str, str]:
        """What a request must carry to get to this engine and no other one of its server.

        Where blocks are held always: the server may have engines of which its node does not tell. One that has a single
        engine takes rank 0 for it.
        """
        engine = self.engine
        named = engine is not None and (bool(engine.connector_version) or len(self.node.engines) > 1)
        return {RANK_HEADER: str(engine.rank)} if engine is not None and named else {}

    @property
    def reuse(self) -> bool:
        """Whether the engine verifies and retains block sets: without the connector it takes any for the prompt's."""
        return self.engine is not None and self.engine.reuse and bool(self.engine.connector_version)

    @property
    def labelled(self) -> bool:
        """Whether turns are named to the engine in vLLM's own way, so that its owner can give second chances.

        Where block sets are retained the connector is told their names, and the owner knows them.
        """
        return self.engine is not None and self.engine.second_chance and not self.reuse

    @property
    def weights_digest(self) -> str:
        """The engine's weights; empty when unknown."""
        return self.engine.weights_digest if self.engine else ""


def targets_of(nodes: Iterable[Node]) -> Iterator[Target]:
    """Returns all engines of these nodes."""
    for node in nodes:
        if node.engines:
            yield from (Target(node, engine) for engine in node.engines)
        else:
            yield Target(node)
