"""Releases and renewals that somebody asks for; those of policy stand in `retaining`, when one is sent in `life`.

Ids that no connector reported are never touched: other requests' hand-offs live among the engine's leases too. A
hand-off is freed only by its name, on the word of the router that alone knows it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.holdings import Holdings
from backhaul_node_agent.core.life import State


@dataclass(slots=True)
class ReleaseOutcome:
    """What became of a request to release sets."""

    released: list[str] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class Releasing:
    """Releases sets or has them kept longer."""

    def __init__(self, holdings: Holdings) -> None:
        self._held = holdings

    def release(self, set_ids: Sequence[str], now: float) -> tuple[ReleaseOutcome, list[ev.Effect]]:
        """Releases the sets that may be released, notes the others, leaves unknown ids alone."""
        outcome = ReleaseOutcome()
        effects: list[ev.Effect] = []
        for set_id in set_ids:
            engine = self._held.holder_of(set_id)
            if engine is None:
                outcome.unknown.append(set_id)
                continue
            effects += self._held.step(engine, engine.lives[set_id], lf.ReleaseAsked(), now)
            now_releasing = engine.lives[set_id].state is State.RELEASING
            (outcome.released if now_releasing else outcome.deferred).append(set_id)
        return outcome, effects

    def fenced(self, scope: str, keys: Collection[str]) -> list[str]:
        """Returns the sets behind a fence under one of the keys: nobody can name them, for no pointer leads to them."""
        lives = (engine.lives[set_id] for engine in self._held.engines.values() for set_id in engine.fenced)
        found = (life.block_set for life in lives if life.block_set.scope == scope)
        return [one.set_id for one in found if not set(keys).isdisjoint(one.keys)]

    def hand_off(self, engine_id: str, hand_off_id: str) -> list[ev.Effect] | str:
        """Frees a hand-off that nobody will read; a reason when it is none of these engines'."""
        if engine_id not in self._held.engines:
            return "ENGINE_UNKNOWN"
        if self._held.holder_of(hand_off_id) is not None:
            return "NOT_A_HAND_OFF"
        return [ev.SendRelease(engine_id, hand_off_id)]

    def drain(self, now: float) -> list[ev.Effect]:
        """Releases all sets, those that come from now on included, and ends all granting."""
        self._held.draining = True
        return [
            effect
            for engine_id, engine in self._held.engines.items()
            for effect in self._held.step_known(
                engine_id, list(engine.lives), lf.ReleaseAsked(why=lf.Why.DRAINING), now
            )
        ]

    def renew(self, set_ids: Sequence[str]) -> tuple[list[str], list[str], list[ev.Effect]]:
        """Asks for more time for the sets that are known; returns them, the unknown ids, and the effects."""
        by_engine: dict[str, list[str]] = {}
        unknown: list[str] = []
        for set_id in set_ids:
            engine = self._held.holder_of(set_id)
            if engine is None:
                unknown.append(set_id)
            else:
                by_engine.setdefault(engine.facts.engine_id, []).append(set_id)
        effects: list[ev.Effect] = [ev.SendRenewal(engine_id, tuple(ids)) for engine_id, ids in by_engine.items()]
        return [set_id for ids in by_engine.values() for set_id in ids], unknown, effects
