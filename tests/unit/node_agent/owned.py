"""An owner on its feet: joined, one engine connected, its clock known."""

import itertools
from dataclasses import dataclass, field

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_node_agent.core.granting import ClaimRequest, Grant, Refusal
from backhaul_node_agent.core.life import Limits, State
from backhaul_node_agent.core.owner import Owner
from backhaul_node_agent.core.releasing import ReleaseOutcome

OFFSET = 5000.0
"""How far engines' clocks are ahead of the agent's."""
LIMITS = Limits(claim_ttl_s=30.0, margin_s=2.0)


def block_set(set_id: str = "set-1", scope: str = "scope-1") -> BlockSet:
    """Returns a set that was reported."""
    return BlockSet(
        set_id=set_id,
        scope=scope,
        keys=("key-1",),
        params={},
        token_count=100,
        block_count=4,
        identity=b"i" * 16,
        stride=64,
        spacing=64,
        anchors=b"a" * 32,
    )


def facts(engine_id: str = "engine-1", rank: int = 0, weights: str = "weights") -> EngineFacts:
    """Returns what an engine's connector says."""
    return EngineFacts(engine_id, rank, "0.1.0", "0.32.0", weights, 32, 1000, 1, 480.0, "127.0.0.1", 5601)


@dataclass
class OwnerTable:
    """Drives an owner by hand, with a clock of its own; collects all effects."""

    session: str = "session-1"
    now: float = 100.0
    valid: bool = True
    effects: list[ev.Effect] = field(default_factory=list)
    connections: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    connection: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owner = Owner(session=self.session, limits=LIMITS)

    def hear(self, event: ev.Event) -> list[ev.Effect]:
        """Passes an event on."""
        effects = self.owner.handle(event, self.now)
        self.effects += effects
        return effects

    def join(self, *, lasts_s: float = 1e9, joined: bool = True) -> None:
        """Gets the lease."""
        self.hear(ev.LeaseHeld(self.now + lasts_s, joined))

    def connect(
        self,
        engine_id: str = "engine-1",
        *,
        last_session: str = "session-1",
        rank: int = 0,
        weights: str = "weights",
        replay: bool = True,
        offset: float = OFFSET,
    ) -> None:
        """Connects an engine's connector, replays nothing, and learns its clock."""
        self.connection[engine_id] = next(self.connections)
        self.hear(ev.EngineConnected(self.connection[engine_id], facts(engine_id, rank, weights), last_session))
        self.ping(engine_id, offset=offset)
        if replay:
            self.replayed(engine_id)

    def disconnect(self, engine_id: str = "engine-1") -> None:
        """Cuts a connection."""
        self.hear(ev.ConnectorLost(self.connection[engine_id], engine_id))

    def replayed(self, engine_id: str = "engine-1") -> list[ev.Effect]:
        """Ends a replay."""
        return self.hear(ev.ReplayFinished(self.connection[engine_id], engine_id))

    def ping(
        self, engine_id: str = "engine-1", *, offset: float = OFFSET, round_trip_s: float = 0.0
    ) -> list[ev.Effect]:
        """Observes an engine's clock."""
        sent = self.now - round_trip_s
        return self.hear(
            ev.ClockObserved(self.connection[engine_id], engine_id, sent, sent + round_trip_s / 2 + offset, self.now)
        )

    def publishing(self, engine_id: str = "engine-1") -> None:
        """Brings the pointers' stream up."""
        self.hear(ev.PublisherUp(engine_id))

    def report(
        self,
        set_id: str = "set-1",
        *,
        engine_id: str = "engine-1",
        ttl_s: float = 480.0,
        granted: bool = False,
        replayed: bool = False,
        connection: int | None = None,
    ) -> list[ev.Effect]:
        """Reports a set whose deadline is `ttl_s` from now."""
        return self.hear(
            ev.Reported(
                connection or self.connection[engine_id],
                engine_id,
                block_set(set_id),
                self.now + OFFSET + ttl_s,
                granted=granted,
                replayed=replayed,
            )
        )

    def free(self, *set_ids: str, engine_id: str = "engine-1") -> list[ev.Effect]:
        """The engine frees sets."""
        return self.hear(ev.SetsFreed(self.connection[engine_id], engine_id, set_ids))

    def confirm(self, set_id: str, ttl_s: float, engine_id: str = "engine-1") -> None:
        """The engine confirms a deadline `ttl_s` from now."""
        deadlines = {set_id: self.now + OFFSET + ttl_s}
        self.hear(ev.DeadlinesConfirmed(self.connection[engine_id], engine_id, deadlines))

    def claim(
        self,
        set_id: str = "set-1",
        *,
        request_id: str = "request-1",
        engine_id: str = "engine-1",
        scope: str = "scope-1",
        weights: str = "weights",
    ) -> Grant | Refusal:
        """Claims a set, and answers the claim when that is allowed."""
        request = ClaimRequest(request_id, set_id, engine_id, scope, weights)
        outcome, effects = self.owner.claim(request, self.now)
        self.effects += effects
        if isinstance(outcome, Grant):
            return self.owner.confirm(request, self.now) or outcome
        return outcome

    def granted(self, set_id: str = "set-1", *, request_id: str = "request-1") -> Grant:
        """Claims a set that must be granted."""
        outcome = self.claim(set_id, request_id=request_id)
        assert isinstance(outcome, Grant), outcome
        return outcome

    def refused(self, set_id: str = "set-1", *, request_id: str = "request-1") -> str:
        """Claims a set that must be refused; returns the reason."""
        outcome = self.claim(set_id, request_id=request_id)
        assert isinstance(outcome, Refusal), outcome
        return outcome.reason

    def give_back(self, request_id: str = "request-1") -> list[ev.Effect]:
        """Returns a claim."""
        effects = self.owner.give_back(request_id, self.now)
        self.effects += effects
        return effects

    def release(self, *set_ids: str) -> ReleaseOutcome:
        """Asks for a release."""
        outcome, effects = self.owner.release(set_ids, self.now)
        self.effects += effects
        return outcome

    def passes(self, seconds: float, *, step_s: float = 1.0) -> list[ev.Effect]:
        """Lets time pass, with ticks."""
        seen: list[ev.Effect] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step_s)
            seen += self.hear(ev.TimePassed())
        return seen

    def state(self, set_id: str = "set-1") -> State | None:
        """Returns a set's state, None when it is gone."""
        states = {held.name.set_id: held.state for held in self.owner.sets(self.now)}
        return states.get(set_id)

    def releases(self, set_id: str = "set-1") -> int:
        """Returns how often the engine was told to free a set."""
        return sum(isinstance(effect, ev.SendRelease) and effect.set_id == set_id for effect in self.effects)


def standing(*, lasts_s: float = 1e9) -> OwnerTable:
    """Returns an owner that is joined, whose engine is connected and whose pointers are published."""
    table = OwnerTable()
    table.join(lasts_s=lasts_s)
    table.connect()
    table.publishing()
    return table
