"""What the console shows of a router now, and what has changed since somebody looked last."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from backhaul_common.clock import Clock
from backhaul_router.core.console import views
from backhaul_router.core.console.history import STEP_S, History
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.console.pairing import pairing_of
from backhaul_router.core.console.problems import Found, Problem, Seen, problems
from backhaul_router.core.console.reasons import REASONS
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.routing.live import Live

TICK_S = 1.0
"""Between two messages to an onlooker."""

MAX_TURNS = 40
"""Turns in one message; of more only the newest are in it, and how many were left out."""

KEPT_TURNS = 2_000
"""Turns that are over and remembered, some 2 KB each."""

_SETTLED_S = 10.0
"""After a router's start: agents have told their load by then."""

Document = dict[str, Any]


class Registry(Protocol):
    """Who lists the nodes."""

    @property
    def follows(self) -> bool:
        """Whether the nodes are as a registry has them now, as far as is known."""
        ...


@dataclass(slots=True)
class Cursor:
    """What one onlooker has been told."""

    look: int = 0
    """The last look whose changes it knows."""
    nodes: frozenset[str] = frozenset()
    place: int = 0
    """Of the last turn."""
    sampled_at: float = 0.0
    problems: list[Problem] | None = None
    reasons: set[str] = field(default_factory=set)


class ConsoleState:
    """Looks at nodes when it is asked, and takes a sample every ten seconds (`run`).

    Onlookers hold no queue: whoever is slow finds the latest when it comes back.
    """

    def __init__(
        self,
        *,
        table: NodeTable,
        live: Live,
        journal: Journal,
        registry: Registry,
        clock: Clock,
        tenants: bool,
        tick_s: float = TICK_S,
    ) -> None:
        """``tenants``: whether there are any. ``tick_s``: how often onlookers are told what has changed."""
        self.tick_s = tick_s
        self._table = table
        self._live = live
        self._journal = journal
        self._registry = registry
        self._clock = clock
        self._tenants = tenants
        self._history = History()
        self._began_at = clock.monotonic()
        self._looked_at: float | None = None
        self._look = 0
        self._rows: dict[str, tuple[Document, int]] = {}
        """Each node, and the look at which it changed last."""
        self._problems: list[Problem] = []
        self._pairing: tuple[int, tuple[Found, ...]] = (-1, ())
        """What does not fit together, and the version of the table in which."""

    async def run(self) -> None:
        """Takes samples until it is cancelled."""
        while True:
            await self._clock.sleep(STEP_S)
            self.sample()

    def sample(self) -> None:
        """Takes a sample."""
        held = {node.node_id: views.held_by(node, self._live.reports.of) for node in self._table}
        self._history.take(self._clock.monotonic(), self._journal.tally, held)

    def whole(self, cursor: Cursor) -> Document:
        """Returns everything."""
        self._look_around()
        return {
            **views.history_view(self._history),
            "began_at": round(self._began_at, 1),
            "step_s": STEP_S,
            "kept_turns": KEPT_TURNS,
            "tenants": self._tenants,
            "changes": self.changes(cursor, whole=True),
        }

    def changes(self, cursor: Cursor, *, whole: bool = False) -> Document:
        """Returns what is new to an onlooker."""
        self._look_around()
        journal, tally = self._journal, self._journal.tally
        turns = journal.since(cursor.place, most=MAX_TURNS)
        left_out = 0 if whole else journal.ended_count - cursor.place - len(turns)
        nodes = frozenset(self._rows)
        document: Document = {
            "now": round(self._clock.monotonic(), 3),
            "registry": self._registry.follows,
            "running": journal.running_count,
            "tally": views.tally_view(tally),
            "nodes": [row for row, changed in self._rows.values() if changed > cursor.look],
            "gone": sorted(cursor.nodes - nodes),
            "turns": [views.turn_view(entry, tenants=self._tenants) for entry in turns],
            "left_out": left_out,
            "reasons": views.reasons_view((tally.misses.keys() | REASONS.keys()) - cursor.reasons),
            "samples": []
            if whole
            else [views.sample_view(one) for one in self._history.samples if one.at > cursor.sampled_at],
        }
        if cursor.problems != self._problems:
            document["problems"] = [views.problem_view(problem) for problem in self._problems]
        self._told(cursor, nodes)
        return document

    def _told(self, cursor: Cursor, nodes: frozenset[str]) -> None:
        cursor.look, cursor.nodes, cursor.problems = self._look, nodes, self._problems
        cursor.place = self._journal.ended_count
        cursor.sampled_at = self._history.samples[-1].at if self._history.samples else 0.0
        cursor.reasons |= self._journal.tally.misses.keys() | REASONS.keys()

    def _look_around(self) -> None:
        """Looks at all nodes, once for all who look on: nearly a tick must have passed."""
        now = self._clock.monotonic()
        if self._looked_at is not None and now - self._looked_at < 0.9 * self.tick_s:
            return
        self._looked_at = now
        self._look += 1
        before: Mapping[str, tuple[Document, int]] = self._rows
        self._rows = {}
        for node in self._table:
            row = views.node_view(node, self._live.breakers.state(node), self._live.reports.of)
            old, changed = before.get(node.node_id, (None, 0))
            self._rows[node.node_id] = (row, changed if row == old else self._look)
        self._problems = problems(self._seen(now), self._pairs())

    def _seen(self, now: float) -> Seen:
        return Seen(
            table=self._table,
            state=self._live.breakers.state,
            report=self._live.reports.of,
            registry_answers=self._registry.follows,
            settled=now - self._began_at >= _SETTLED_S,
        )

    def _pairs(self) -> tuple[Found, ...]:
        version = self._table.version
        if self._pairing[0] != version:
            self._pairing = version, pairing_of(self._table)
        return self._pairing[1]
