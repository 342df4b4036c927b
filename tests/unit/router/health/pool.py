"""A pool of nodes that serve turns while a made-up clock runs."""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from backhaul_router.core.engines import Failure
from backhaul_router.core.health.breakers import Breakers, BreakerSettings
from backhaul_router.core.nodes import Node

LEG_S = 0.05
"""How long a leg takes, seconds."""

FaultShare = Callable[[float], float]
"""Share of a node's legs that fail, at a time."""


class Now:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg of a run: when it was sent, and where to."""

    sent: float
    node_id: str


@dataclass(slots=True)
class Run:
    """What happened."""

    legs: list[Leg] = field(default_factory=list)
    faults: list[Leg] = field(default_factory=list)
    ejections: list[tuple[float, str]] = field(default_factory=list)
    """When which node was ejected."""

    def share(self, node_id: str, since: float, until: float) -> float:
        """Returns the share of the legs sent in this time that this node got."""
        there = [leg.node_id for leg in self.legs if since <= leg.sent < until]
        return there.count(node_id) / len(there)


class Pool:
    """Nodes, legs per second in all, and the share of faults of nodes that are not well."""

    def __init__(self, nodes: Sequence[Node], *, rate: float, faulty: Mapping[str, FaultShare], seed: int) -> None:
        self.now = Now()
        self.nodes = nodes
        self._rng = random.Random(seed)
        self.breakers = Breakers(self.now, random.Random(seed + 1), BreakerSettings())
        self._rate = rate
        self._faulty = faulty
        self._running: list[tuple[float, int]] = []
        self._ejected: set[str] = set()
        self.run = Run()

    def until(self, end: float) -> Run:
        """Serves until then."""
        while (sent := self.now.value + self._rng.expovariate(self._rate)) < end:
            self._finish(sent)
            self.now.value = sent
            self._send()
        self.now.value = end
        return self.run

    def _send(self) -> None:
        """Goes to any node that is not avoided."""
        node = self._rng.choice([node for node in self.nodes if not self.breakers.avoided(node)] or self.nodes)
        self.breakers.picked(node)
        heapq.heappush(self._running, (self.now.value + LEG_S, len(self.run.legs)))
        self.run.legs.append(Leg(self.now.value, node.node_id))

    def _finish(self, until: float) -> None:
        while self._running and self._running[0][0] <= until:
            self.now.value, number = heapq.heappop(self._running)
            leg = self.run.legs[number]
            node = next(node for node in self.nodes if node.node_id == leg.node_id)
            if self._rng.random() < self._faulty.get(leg.node_id, _never)(leg.sent):
                self.run.faults.append(leg)
                self.breakers.failed(node, Failure.FAULT)
            else:
                self.breakers.answered(node)
            self._note(node)

    def _note(self, node: Node) -> None:
        ejected = self.breakers.state(node).value == "open"
        if ejected and node.node_id not in self._ejected:
            self.run.ejections.append((self.now.value, node.node_id))
        self._ejected = self._ejected | {node.node_id} if ejected else self._ejected - {node.node_id}


def always(share: float) -> FaultShare:
    """Fails this share of its legs."""
    return lambda _: share


def between(since: float, until: float, share: float) -> FaultShare:
    """Fails this share of the legs sent in this time."""
    return lambda sent: share if since <= sent < until else 0.0


def _never(_: float) -> float:
    return 0.0
