"""What agents say of their engines' load: the last word of each, for as long as it is fresh."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from backhaul_router.core.routing.target import TargetKey

MAX_AGE_S = 5.0
"""Agents speak every second; what is older than this says nothing about now."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What finished turns hold of an engine's KV cache."""

    sets: int
    blocks: int
    block_limit: int
    """Blocks that they may hold now."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine has to do, whoever gave it to it."""

    running: int
    waiting: int
    kv_usage: float
    """Part of its KV cache in use, 0 to 1."""
    free_blocks: int | None = None
    """Blocks that it could use at once, cached ones among them; None when unknown."""
    retention: Retention | None = None
    """None when unknown."""


class Reports:
    """The last report of each engine, with its age."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._nodes: dict[str, dict[str, tuple[EngineReport, float]]] = {}

    def take(self, key: TargetKey, report: EngineReport) -> None:
        """Takes what was just said of one engine."""
        node_id, engine_id = key
        self._nodes.setdefault(node_id, {})[engine_id] = (report, self._monotonic())

    def take_all(self, node_id: str, reports: Mapping[str, EngineReport]) -> None:
        """Takes what was just said of all engines of a node, by engine id; others of that node are no more."""
        now = self._monotonic()
        self._nodes[node_id] = {engine_id: (report, now) for engine_id, report in reports.items()}

    def of(self, key: TargetKey) -> EngineReport | None:
        """Returns the last word about an engine; None when there is none, or it is older than 5 s."""
        node_id, engine_id = key
        report, taken_at = self._nodes.get(node_id, {}).get(engine_id, (None, 0.0))
        return report if self._monotonic() - taken_at <= MAX_AGE_S else None

    def drop(self, node_ids: Collection[str]) -> None:
        """Drops what is known of nodes that have left: of these, and of no others."""
        for node_id in node_ids:
            self._nodes.pop(node_id, None)
