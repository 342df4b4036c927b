"""What each engine has to do, under the name that it has in the directory.

A server shows figures by data-parallel rank. They are an engine's only if they were asked for after that rank's engine
was known by its id: those before may be another incarnation's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backhaul_node_agent.core.progress import Figures

MAX_AGE_S = 3.0
"""Servers are asked every second; what they showed before that says nothing about now."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What block sets hold of one engine."""

    set_count: int
    block_count: int
    block_limit: int
    """Blocks that they may hold now."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine has to do."""

    engine_id: str
    running_count: int
    waiting_count: int
    kv_usage: float
    """Part of the KV cache in use, 0 to 1."""
    free_block_count: int | None
    """None when unknown."""
    retention: Retention | None = None
    """None when unknown."""


@dataclass(frozen=True, slots=True)
class _Named:
    engine_id: str
    since: float


@dataclass(frozen=True, slots=True)
class _Shown:
    figures: Figures
    asked_at: float


class EngineLoads:
    """The last figures of each rank, and whose they are. Instants are by the agent's clock."""

    def __init__(
        self, free_block_count: Callable[[str], int | None], retention: Callable[[str], Retention | None]
    ) -> None:
        """Both tell it of an engine by its id."""
        self._free_block_count = free_block_count
        self._retention = retention
        self._named: dict[int, _Named] = {}
        self._shown: dict[int, _Shown] = {}

    def name(self, engine_ids: Mapping[int, str], now: float) -> None:
        """Takes the ids of all engines, by rank."""
        before = self._named
        self._named = {
            rank: before[rank] if rank in before and before[rank].engine_id == engine_id else _Named(engine_id, now)
            for rank, engine_id in engine_ids.items()
        }

    def see(self, figures: Mapping[int, Figures], asked_at: float) -> None:
        """Takes the figures that a server showed, by rank. A rank that it did not show keeps its own for a while."""
        shown = self._shown | {rank: _Shown(one, asked_at) for rank, one in figures.items()}
        self._shown = {rank: one for rank, one in shown.items() if rank in self._named}

    def loads(self, now: float) -> tuple[EngineLoad, ...]:
        """Returns what is known now, by rank."""
        known = [(named, self._shown[rank]) for rank, named in sorted(self._named.items()) if rank in self._shown]
        return tuple(
            self._load(named.engine_id, shown.figures)
            for named, shown in known
            if shown.asked_at >= named.since and now - shown.asked_at <= MAX_AGE_S
        )

    def _load(self, engine_id: str, figures: Figures) -> EngineLoad:
        return EngineLoad(
            engine_id=engine_id,
            running_count=round(figures.running),
            waiting_count=round(figures.waiting),
            kv_usage=figures.used,
            free_block_count=self._free_block_count(engine_id),
            retention=self._retention(engine_id),
        )
