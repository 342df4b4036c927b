"""An owner on its feet: joined, one engine connected, its clock known."""

import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backhaul_connector.anchors import AnchorChain, Anchors
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_node_agent.core.granting import ClaimRequest, Grant, Refusal
from backhaul_node_agent.core.life import Limits, State
from backhaul_node_agent.core.owner import Owner
from backhaul_node_agent.core.releasing import ReleaseOutcome
from backhaul_node_agent.core.retention.gaps import Gaps
from backhaul_node_agent.core.retention.policy import Benefit, Policy

OFFSET = 5000.0
"""How far engines' clocks are ahead of the agent's."""
LIMITS = Limits(claim_ttl_s=30.0, margin_s=2.0)


def block_set(set_id: str = "set-1", scope: str = "scope-1", **changes: Any) -> BlockSet:
    """Returns a set that was reported."""
    fields: dict[str, Any] = {
        "set_id": set_id,
        "scope": scope,
        "keys": (f"key-of-{set_id}",),
        "params": {},
        "token_count": 100,
        "block_count": 4,
        "identity": b"i" * 16,
        "stride": 64,
        "spacing": 64,
        "anchors": b"a" * 32,
    }
    return BlockSet(**{**fields, **changes})


def anchored(token_count: int, *, edited_at: int | None = None) -> dict[str, Any]:
    """Returns what a set says of its tokens, which count up; from ``edited_at`` on they are others."""
    tokens = [token if edited_at is None or token < edited_at else -token for token in range(token_count)]
    chain = AnchorChain(b"i" * 16, 64)
    chain.extend(tokens)
    made = Anchors.of(chain, b"i" * 16)
    return {"token_count": token_count, "spacing": made.spacing, "anchors": made.digests}


def facts(engine_id: str = "engine-1", rank: int = 0, weights: str = "weights") -> EngineFacts:
    """Returns what an engine's connector says."""
    return EngineFacts(
        engine_id, rank, "0.1.0", "0.32.0", weights, 32, 1000, 1, 480.0, "127.0.0.1", 5601, lease_s=180.0
    )


@dataclass
class OwnerTable:
    """Drives an owner by hand, with a clock of its own; collects all effects."""

    session: str = "session-1"
    now: float = 100.0
    valid: bool = True
    effects: list[ev.Effect] = field(default_factory=list)
    connections: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    connection: dict[str, int] = field(default_factory=dict)
    limits: Limits = LIMITS
    policy: Callable[[Gaps], Policy] = Benefit
    blocks: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.owner = Owner(session=self.session, limits=self.limits, policy=self.policy)

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
        age_s: float = 0.0,
        **changes: Any,
    ) -> list[ev.Effect]:
        """Reports a set whose deadline is `ttl_s` from now; it has four blocks of its own, unless told otherwise."""
        changes.setdefault("block_ids", (array("i", (next(self.blocks) % 1000 for _ in range(4))),))
        changes.setdefault("ended_at", self.now + OFFSET - age_s)
        return self.hear(
            ev.Reported(
                connection or self.connection[engine_id],
                engine_id,
                block_set(set_id, **changes),
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

    def memory(self, free_count: int, waiting_count: int = 0, engine_id: str = "engine-1") -> list[ev.Effect]:
        """The connector says how full the engine is."""
        return self.hear(ev.MemorySeen(self.connection[engine_id], engine_id, free_count, waiting_count))

    def retention(self) -> list[ev.Effect]:
        """Lets retention do what is due."""
        return self.hear(ev.RetentionDue())

    def held(self) -> list[str]:
        """Returns the sets that are HELD, in the order of their reports."""
        return [one.name.set_id for one in self.owner.sets(self.now) if one.state is State.HELD]

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

    def unpublished(self) -> list[str]:
        """Returns the sets whose pointers were to be removed, in order."""
        return [effect.block_set.set_id for effect in self.effects if isinstance(effect, ev.Unpublish)]

    def releases(self, set_id: str = "set-1") -> int:
        """Returns how often the engine was told to free a set."""
        return sum(isinstance(effect, ev.SendRelease) and effect.set_id == set_id for effect in self.effects)


def standing(*, lasts_s: float = 1e9, **changes: Any) -> OwnerTable:
    """Returns an owner that is joined, whose engine is connected and whose pointers are published."""
    table = OwnerTable(**changes)
    table.join(lasts_s=lasts_s)
    table.connect()
    table.publishing()
    return table
