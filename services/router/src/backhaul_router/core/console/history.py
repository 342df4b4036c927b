"""How things went over the last half hour: one sample every ten seconds."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from backhaul_router.core.console.journal import Tally

STEP_S = 10.0
KEPT = 180
"""Samples: half an hour."""


@dataclass(frozen=True, slots=True)
class Held:
    """What finished turns hold, on one node or on all of them."""

    sets: int = 0
    blocks: int = 0
    block_limit: int = 0
    tokens: int = 0
    """Those of the blocks."""

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.sets + other.sets,
            self.blocks + other.blocks,
            self.block_limit + other.block_limit,
            self.tokens + other.tokens,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One step."""

    at: float
    """Its end, by the router's monotonic clock."""
    routes: Mapping[str, int]
    """Turns that ended in it."""
    continued: int
    reused: int
    failed: int
    prompt_tokens: int
    local_tokens: int
    read_tokens: int
    ttft_s: Mapping[str, float]
    """Mean time to the first byte of its streamed turns, by route."""
    held: Held
    """At its end."""


class History:
    """The last samples, and of each node the blocks that it retained."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self.nodes: dict[str, deque[int]] = {}
        """Blocks by node, oldest first; the last one is of the last sample. 0 where it was not known."""
        self._before = Sums.of(Tally())

    def take(self, at: float, tally: Tally, held: Mapping[str, Held]) -> Sample:
        """Takes a step. ``held``: what each listed node's finished turns hold; others are forgotten."""
        now = Sums.of(tally)
        sample = now.since(self._before, at, sum(held.values(), Held()))
        self._before = now
        self.samples.append(sample)
        self.nodes = {node_id: self.nodes.get(node_id, deque(maxlen=KEPT)) for node_id in held}
        for node_id, one in held.items():
            self.nodes[node_id].append(one.blocks)
        return sample


@dataclass(frozen=True, slots=True)
class Sums:
    """A tally at one instant."""

    routes: Mapping[str, int]
    ttft_counts: Mapping[str, int]
    ttft_s: Mapping[str, float]
    continued: int
    reused: int
    failed: int
    prompt_tokens: int
    local_tokens: int
    read_tokens: int

    @classmethod
    def of(cls, tally: Tally) -> "Sums":
        """Returns what a tally says now."""
        return cls(
            routes=dict(tally.routes),
            ttft_counts=dict(tally.ttft_counts),
            ttft_s=dict(tally.ttft_s),
            continued=tally.continued,
            reused=tally.reused,
            failed=sum(tally.results.values()) - tally.results["ok"],
            prompt_tokens=tally.prompt_tokens,
            local_tokens=tally.local_tokens,
            read_tokens=tally.read_tokens,
        )

    def since(self, before: "Sums", at: float, held: Held) -> Sample:
        """Returns what has come since an earlier instant."""
        counts = {route: count - before.ttft_counts.get(route, 0) for route, count in self.ttft_counts.items()}
        return Sample(
            at=at,
            routes={route: count - before.routes.get(route, 0) for route, count in self.routes.items()},
            continued=self.continued - before.continued,
            reused=self.reused - before.reused,
            failed=self.failed - before.failed,
            prompt_tokens=self.prompt_tokens - before.prompt_tokens,
            local_tokens=self.local_tokens - before.local_tokens,
            read_tokens=self.read_tokens - before.read_tokens,
            ttft_s={
                route: (self.ttft_s[route] - before.ttft_s.get(route, 0.0)) / count
                for route, count in counts.items()
                if count
            },
            held=held,
        )
