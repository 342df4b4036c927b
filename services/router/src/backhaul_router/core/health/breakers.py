"""Which nodes are well enough to be given requests: each by itself, and beside its peers."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from backhaul_router.core.engines import Failure
from backhaul_router.core.health.circuit import BreakerSettings, BreakerState, Circuit
from backhaul_router.core.nodes import Node

__all__ = ["BreakerSettings", "BreakerState", "Breakers", "OnEject"]


OnEject = Callable[[Node, Failure], None]


class Breakers:
    """The breakers of all nodes. Errors that blame the client and clients that leave are not told to it.

    Peers are nodes of the same role that share a model.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        rng: random.Random,
        settings: BreakerSettings,
        *,
        on_eject: OnEject = lambda _node, _failure: None,
    ) -> None:
        """``on_eject`` is told of each node that is ejected, and of its latest failure."""
        self._monotonic = monotonic
        self._on_eject = on_eject
        self._rng = rng
        self._settings = settings
        self._circuits: dict[str, Circuit] = {}
        self._doubtful: set[str] = set()
        """Nodes whose breaker may be other than closed; all others' are closed."""

    # Nodes that come and go

    def seen(self, node_ids: Collection[str]) -> None:
        """These nodes are listed. New ones start slowly, unless the first ones are hardly older than that."""
        now = self._monotonic()
        running = any(circuit.since + self._settings.slow_start_s <= now for circuit in self._circuits.values())
        for node_id in node_ids:
            if node_id not in self._circuits:
                self._circuits[node_id] = Circuit(self._settings, now, starting=running)
                self._doubtful.add(node_id)

    def know(self, nodes: Iterable[Node]) -> None:
        """These are nodes as they are now: who a node's peers are follows from it."""
        for node in nodes:
            if circuit := self._circuits.get(node.node_id):
                circuit.node = node

    def forget(self, node_ids: Collection[str]) -> None:
        """Drops what is known of nodes other than these."""
        self._circuits = {node_id: circuit for node_id, circuit in self._circuits.items() if node_id in node_ids}

    # What became of legs

    def failed(self, node: Node, failure: Failure) -> None:
        """A leg on this node failed. What fails by another node (SOURCE_GONE) counts for nothing here."""
        if failure is Failure.SOURCE_GONE:
            return
        now, circuit = self._monotonic(), self._circuit(node)
        self._doubtful.add(node.node_id)
        state = circuit.state(now)
        circuit.failed(now)
        if state is BreakerState.OPEN:
            return
        if state is BreakerState.HALF_OPEN:
            circuit.eject(now, by_share=circuit.by_share)
        elif circuit.fails_often(now) and self._outlier(circuit, node, now) and self._spared(node):
            circuit.eject(now, by_share=True)
        elif circuit.fails_whole(failure):
            circuit.eject(now, by_share=False)
        else:
            return
        self._on_eject(node, failure)

    def answered(self, node: Node) -> None:
        """A leg on this node was answered, if only with an error that blames the client."""
        self._circuit(node).answered(self._monotonic())

    def picked(self, node: Node) -> None:
        """A request goes to this node. If it is half-open this is a probe: until it is answered, others stay away."""
        self._circuit(node).picked(self._monotonic())

    # What follows from it

    @property
    def all_well(self) -> bool:
        """Whether all breakers are closed, so that no node need be avoided."""
        if self._doubtful:
            now, circuits = self._monotonic(), self._circuits
            self._doubtful = {
                node_id
                for node_id in self._doubtful
                if node_id in circuits and circuits[node_id].state(now) is not BreakerState.CLOSED
            }
        return not self._doubtful

    def avoided(self, node: Node) -> bool:
        """Tells whether another node should be preferred this time. While a node starts, the answer is drawn."""
        return self._circuit(node).avoided(self._monotonic(), self._rng)

    def state(self, node: Node) -> BreakerState:
        """Returns how a node is used."""
        return self._circuit(node).state(self._monotonic())

    def states(self) -> Counter[BreakerState]:
        """Returns how many nodes are used in which way. May be called from any thread."""
        now = self._monotonic()
        return Counter(circuit.state(now) for circuit in [*self._circuits.values()])

    def _circuit(self, node: Node) -> Circuit:
        circuit = self._circuits.get(node.node_id)
        if circuit is None:
            circuit = self._circuits[node.node_id] = Circuit(self._settings, self._monotonic())
        circuit.node = node
        return circuit

    def _outlier(self, circuit: Circuit, node: Node, now: float) -> bool:
        """Tells whether a node's share of faults is far beyond its peers'.

        Half a fault is added to theirs: few answers without one prove little, and none nothing. Peers that are ejected
        are no measure.
        """
        peers = [peer for peer in self._pool(node) if peer is not circuit and not peer.ejected()]
        counts = [peer.counts(now) for peer in peers]
        peer_faults, peer_answers = sum(faults for faults, _ in counts), sum(answers for _, answers in counts)
        faults, answers = circuit.counts(now)
        return faults * peer_answers >= self._settings.factor * (peer_faults + 0.5) * answers

    def _spared(self, node: Node) -> bool:
        """Tells whether of each model's nodes at least half, and one, remain without this one."""
        return all(self._remain(node, model) for model in node.models)

    def _remain(self, node: Node, model: str) -> bool:
        pool = [circuit for circuit in self._pool(node) if circuit.node and model in circuit.node.models]
        ejected = sum(circuit.ejected() and circuit.by_share for circuit in pool)
        return ejected < min((len(pool) + 1) // 2, len(pool) - 1)

    def _pool(self, node: Node) -> Iterator[Circuit]:
        """Returns a node's circuit and its peers'."""
        for circuit in self._circuits.values():
            other = circuit.node
            if other and other.role is node.role and not other.models.isdisjoint(node.models):
                yield circuit
