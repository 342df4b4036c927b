"""One agent process beside the decode engine: the real owner, and what its shell does, without I/O."""

from collections.abc import Callable, Sequence

from backhaul_connector import wire
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.life import Limits
from backhaul_node_agent.core.owner import Owner
from tests.model.etcd import LEASE_TTL_S, Etcd

LIMITS = Limits(claim_ttl_s=30.0, margin_s=2.0, max_retention_s=240.0)
LEASE_MARGIN_S = 0.5
_RETRY_S = 1.0


class Publisher:
    """The pointers of one incarnation (backhaul_node_agent.publisher)."""

    def __init__(self, engine_id: str, etcd: Etcd) -> None:
        self.closing = False
        self._engine_id = engine_id
        self._etcd = etcd
        self._lease_id = 0
        self._mark = 0
        self._wanted: dict[str, BlockSet] = {}
        self._removals: dict[str, BlockSet] = {}
        self._dirty: dict[str, None] = {}

    def publish(self, block_set: BlockSet) -> None:
        self._wanted[block_set.set_id] = block_set
        self._removals.pop(block_set.set_id, None)
        self._dirty[block_set.set_id] = None

    def unpublish(self, block_set: BlockSet) -> None:
        self._wanted.pop(block_set.set_id, None)
        self._removals[block_set.set_id] = block_set
        self._dirty[block_set.set_id] = None

    def step(self, now: float, *, joined: bool, reachable: bool) -> list[ev.Event]:
        """Does what there is to do; returns what the owner must hear."""
        events: list[ev.Event] = []
        if self._lease_id and (not reachable or not joined or not self._renewed(now)):
            if reachable and not joined:
                # Closed at this end, the stream is purged; one that breaks leaves its pointers to the lease.
                self._etcd.end_lease(self._lease_id)
            self._lease_id = 0
            events.append(ev.PublisherDown(self._engine_id))
        if self._lease_id and self.closing:
            self._etcd.end_lease(self._lease_id)
            self._lease_id = 0
        if not self._lease_id and joined and reachable and not self.closing:
            self._lease_id, self._mark = self._etcd.grant(now), 0
            self._dirty = dict.fromkeys([*self._removals, *self._wanted])
            events.append(ev.PublisherUp(self._engine_id))
        return events + self._flush()

    def _renewed(self, now: float) -> bool:
        return self._etcd.keep_pointers(self._lease_id, self._mark, now)

    def _flush(self) -> list[ev.Event]:
        if not self._lease_id or not self._dirty:
            return []
        upserts = [self._wanted[set_id] for set_id in self._dirty if set_id in self._wanted]
        removals = [self._removals[set_id] for set_id in self._dirty if set_id in self._removals]
        if not self._etcd.write(self._engine_id, self._lease_id, upserts, removals):
            return []
        self._mark += 1
        self._dirty.clear()
        removed = [self._removals.pop(block_set.set_id).set_id for block_set in removals]
        written = [block_set.set_id for block_set in upserts]
        events: list[ev.Event] = [ev.PointersWritten(self._engine_id, written)] if written else []
        return [*events, ev.PointersRemoved(self._engine_id, removed)] if removed else events


class AgentProcess:
    """One process, from its start to its end."""

    def __init__(
        self, session: str, etcd: Etcd, perform: "Callable[[AgentProcess, ev.Effect], None]", *, retaining: bool
    ) -> None:
        self.session = session
        self.retaining = retaining
        self.owner = Owner(session=session, limits=LIMITS)
        self.reachable = True
        """Whether it reaches the registry."""
        self.frozen = False
        self.drained = False
        self.taken = False
        """Whether it has just learnt that another session took its node."""
        self._etcd = etcd
        self._perform_elsewhere = perform
        self._publishers: dict[str, Publisher] = {}
        self._lease_id = 0
        self._holding = False
        self._expires_at = 0.0
        self._due = 0.0
        self._unheard: list[ev.Event] = []

    def hear(self, event: ev.Event, now: float) -> None:
        """Passes an event to the owner and carries out what it wants."""
        if isinstance(event, ev.EngineConnected):
            self._publishers.setdefault(event.facts.engine_id, Publisher(event.facts.engine_id, self._etcd))
        self.perform(self.owner.handle(event, now), now)

    def lost(self, events: Sequence[ev.Event], now: float, *, noticed: bool) -> None:
        """Takes in what a closed connection still had to say, now or later."""
        self._unheard += events
        if noticed and not self.frozen:
            self.catch_up(now)

    def catch_up(self, now: float) -> None:
        """Takes in what is waiting."""
        unheard, self._unheard = self._unheard, []
        for event in unheard:
            self.hear(event, now)

    def perform(self, effects: Sequence[ev.Effect], now: float) -> None:
        """Carries effects out, in order."""
        for effect in effects:
            match effect:
                case ev.Publish():
                    self._publishers[effect.engine_id].publish(effect.block_set)
                case ev.Unpublish():
                    self._publishers[effect.engine_id].unpublish(effect.block_set)
                case ev.ForgetEngine():
                    self._publishers[effect.engine_id].closing = True
                case _:
                    self._perform_elsewhere(self, effect)

    def step(self, now: float) -> None:
        """Lets time pass."""
        if self.frozen:
            return
        self.catch_up(now)
        self._keep_lease(now)
        for engine_id, publisher in list(self._publishers.items()):
            for event in publisher.step(now, joined=bool(self._lease_id), reachable=self.reachable):
                self.hear(event, now)
            if publisher.closing:
                # Without a stream its pointers are left to their leases.
                del self._publishers[engine_id]
        self.hear(ev.TimePassed(), now)
        if self.retaining:
            self.hear(ev.RetentionDue(), now)

    def lose_lease(self, now: float) -> None:
        """Learns that the lease is gone."""
        if self._lease_id:
            self._lease_id = 0
            self.hear(ev.LeaseLost(), now)

    def _keep_lease(self, now: float) -> None:
        if not self.reachable:
            if now >= self._expires_at:
                self.lose_lease(now)
            return
        if now < self._due:
            return
        self._due = now + _RETRY_S
        if self._lease_id and not self._etcd.keep(self.session, self._lease_id, now):
            self.lose_lease(now)
        joined = False
        if not self._lease_id:
            lease_id = self._etcd.join(self.session, now)
            if lease_id is None:
                self.taken, self._holding = self._holding, False
                return
            self._lease_id, self._holding, joined = lease_id, True, True
        self._due = now + LEASE_TTL_S / 3
        self._expires_at = now + LEASE_TTL_S
        self.hear(ev.LeaseHeld(self._expires_at - LEASE_MARGIN_S, joined), now)


def note_of(effect: ev.TellClaimed | ev.TellReturned) -> wire.Claimed | wire.Returned:
    """Returns what is written to the connector."""
    made = wire.Claimed if isinstance(effect, ev.TellClaimed) else wire.Returned
    return made(set_id=effect.set_id)
