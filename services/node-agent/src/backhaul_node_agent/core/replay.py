"""What connectors bring: their engines, the sets that they report or replay, and the fence around some of these.

An engine that another agent may have been connected to is fenced: what it replays is neither granted nor released until
every claim that the other agent can have made has lapsed, counted from the later of join and connection.
"""

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.claim_book import SetName
from backhaul_node_agent.core.holdings import Engine, Holdings
from backhaul_node_agent.core.life import State
from backhaul_node_agent.core.retaining import Retaining

AWAY_S = 60.0
"""How long an engine whose connector is away is remembered at the least; connectors come back within seconds."""


class Replay:
    """Follows connections, and the sets that they bring."""

    def __init__(self, holdings: Holdings, session: str, retaining: Retaining) -> None:
        """`session` is this agent's own."""
        self._held = holdings
        self._retaining = retaining
        self._session = session

    def connect(self, event: ev.EngineConnected, now: float) -> list[ev.Effect]:
        """Begins a connection, which begins with a replay; ends the incarnation that it replaces."""
        effects: list[ev.Effect] = []
        for other in list(self._held.engines.values()):
            if other.facts.rank == event.facts.rank and other.facts.engine_id != event.facts.engine_id:
                effects += self._held.forget(other.facts.engine_id)
        engine = self._held.engine(event.facts)
        engine.connection = event.connection
        engine.missing = set(engine.lives)
        # `foreign` outlives a connection that was cut in the middle of its replay.
        engine.foreign = engine.foreign or event.last_session != self._session
        if engine.foreign:
            engine.fenced_from = now
        return effects

    def disconnect(self, event: ev.ConnectorLost, now: float) -> list[ev.Effect]:
        """Ends a connection, unless a newer one has begun."""
        engine = self._held.engines.get(event.engine_id)
        if engine is not None and engine.connection == event.connection:
            engine.connection, engine.away_since = None, now
        return []

    def forget_away(self, now: float) -> list[ev.Effect]:
        """Ends engines whose connector does not come back, once nothing that they may still hold can be read.

        Should such an engine come back all the same, it is met as one that another agent was connected to.
        """
        gone = [engine for engine in self._held.engines.values() if self._left_for_good(engine, now)]
        return [effect for engine in gone for effect in self._held.forget(engine.facts.engine_id)]

    def _left_for_good(self, engine: Engine, now: float) -> bool:
        if engine.connection is not None or now < engine.away_since + AWAY_S:
            return False
        earliest = self._held.instant(engine, now).earliest
        return all(life.state is State.RELEASING and earliest >= life.deadline for life in engine.lives.values())

    def report(self, engine: Engine, event: ev.Reported, now: float) -> list[ev.Effect]:
        """Takes a set in, or what is said of one that is known."""
        set_id = event.block_set.set_id
        if engine.missing is not None:
            engine.missing.discard(set_id)
        known = engine.lives.get(set_id)
        if known is not None:
            return self._held.step(engine, known, _said_of_known(engine, event), now)
        if event.replayed and engine.foreign:
            outcome = lf.found(event.block_set, event.deadline, granted=event.granted)
        elif event.granted:
            at = self._held.instant(engine, now)
            outcome = lf.adopted(event.block_set, event.deadline, at, self._held.limits)
        else:
            outcome = lf.born(event.block_set, event.deadline)
        effects = self._held.take(engine, set_id, None, outcome, now)
        name = SetName(event.engine_id, set_id)
        near = self._held.conversations.ended(name, event.block_set, now, just_now=not event.replayed)
        effects += self._retaining.supersede(event.block_set, near, now)
        if self._held.draining:
            effects += self._held.step_known(event.engine_id, [set_id], lf.ReleaseAsked(why=lf.Why.DRAINING), now)
        return effects

    def finish(self, engine: Engine, now: float) -> list[ev.Effect]:
        """Ends a replay: what it did not name is gone."""
        missing, engine.missing, engine.foreign = engine.missing, None, False
        return self._held.step_known(engine.facts.engine_id, list(missing or ()), lf.Freed(), now)

    def fence_over(self, engine: Engine, now: float) -> bool:
        """Tells whether every claim of another agent has lapsed."""
        if self._held.joined_at is None or not engine.connected:
            return False
        start = max(self._held.joined_at, engine.fenced_from)
        return now >= start + self._held.limits.claim_ttl_s + self._held.limits.margin_s


def _said_of_known(engine: Engine, event: ev.Reported) -> lf.Event:
    if not event.replayed:
        return lf.Confirmed(event.deadline)
    if engine.foreign:
        return lf.Found(event.granted, event.deadline)
    return lf.Seen(event.granted, event.deadline)
