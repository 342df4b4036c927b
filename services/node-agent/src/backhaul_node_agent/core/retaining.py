"""What retention itself decides: what is renewed, what is released, and why.

Only HELD sets are, and only through the table in `life`. What is FENCED or CLAIMED counts in the budget and stays; what
is not ours is not seen here at all. Nothing happens before engines can be told: a set whose blocks stay pinned all the
same is better kept findable.
"""

import math
from collections.abc import Sequence
from itertools import takewhile

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.claim_book import SetName
from backhaul_node_agent.core.events import Reason
from backhaul_node_agent.core.holdings import Engine, Holdings
from backhaul_node_agent.core.life import Instant, Life, State, Why
from backhaul_node_agent.core.retention.conversations import covers
from backhaul_node_agent.core.retention.policy import Kept, Policy
from backhaul_node_agent.core.retention.renewing import MAX_PER_MESSAGE, threshold_s

MAX_PER_ROUND = 200
"""Sets that are released for room at once: claims do not wait for thousands. The next round is 20 ms away."""


_WHY = {
    Reason.SUPERSEDED: Why.SUPERSEDED,
    Reason.SURPLUS: Why.OVER_BUDGET,
    Reason.OLD: Why.OLD,
    Reason.UNPUBLISHED: Why.UNPUBLISHED,
}


class Retaining:
    """Keeps what pays, frees what does not."""

    def __init__(self, holdings: Holdings, policy: Policy) -> None:
        self._held = holdings
        self._policy = policy

    def tick(self, now: float) -> list[ev.Effect]:
        """Does all that is due. The first time says that engines can be told."""
        self._held.telling = True
        effects: list[ev.Effect] = []
        for engine in self._held.engines.values():
            effects += self._release_where(engine, Reason.SUPERSEDED, list(engine.superseded), now)
            effects += self._release_where(engine, Reason.UNPUBLISHED, self._unpublished(engine, now), now)
            effects += self._release_where(engine, Reason.OLD, self._old(engine, now), now)
            effects += self.make_room(engine, now)
            effects += self._renew(engine, now)
        return effects

    def published(self, event: ev.PointersWritten) -> list[ev.Effect]:
        """Notes that sets can be found."""
        engine = self._held.engines.get(event.engine_id)
        if engine is not None:
            for set_id in event.set_ids:
                engine.unpublished.pop(set_id, None)
        return []

    def supersede(self, newer: BlockSet, near: Sequence[SetName], now: float) -> list[ev.Effect]:
        """Releases those of earlier sets that a newer one certainly covers, now or as soon as they are HELD."""
        effects: list[ev.Effect] = []
        for name in near:
            engine = self._held.engines.get(name.engine_id)
            life = engine.lives.get(name.set_id) if engine is not None else None
            if engine is not None and life is not None and covers(newer, life.block_set):
                engine.superseded[name.set_id] = None
                if self._held.telling:
                    effects += self._release_where(engine, Reason.SUPERSEDED, [name.set_id], now)
        return effects

    def make_room(self, engine: Engine, now: float) -> list[ev.Effect]:
        """Releases the sets that are worth least until those that stay are within the budget."""
        if not self._held.telling or not engine.connected or not engine.budget.surplus:
            return []
        effects: list[ev.Effect] = []
        at = self._held.instant(engine, now)

        engine.ranking.look(lambda set_id: self._policy.worth(self._kept(engine, engine.lives[set_id], at)), now)
        for _ in range(MAX_PER_ROUND):
            if not engine.budget.surplus or (set_id := engine.ranking.pop_least()) is None:
                break
            effects += self._release(engine, engine.lives[set_id], Reason.SURPLUS, now)
        return effects

    def _unpublished(self, engine: Engine, now: float) -> list[str]:
        # In the order in which they were asked for.
        asked_by = now - self._held.limits.unpublished_s
        return [set_id for set_id, _ in takewhile(lambda asked: asked[1] <= asked_by, engine.unpublished.items())]

    def _old(self, engine: Engine, now: float) -> list[str]:
        at, most_s = self._held.instant(engine, now), self._held.limits.max_retention_s
        return [set_id for set_id in engine.schedule.old(at, most_s) if _age_s(engine.lives[set_id], at) >= most_s]

    def _release_where(self, engine: Engine, reason: Reason, set_ids: Sequence[str], now: float) -> list[ev.Effect]:
        lives = (engine.lives[set_id] for set_id in set_ids)
        return [
            effect for life in lives if life.state is State.HELD for effect in self._release(engine, life, reason, now)
        ]

    def _release(self, engine: Engine, life: Life, reason: Reason, now: float) -> list[ev.Effect]:
        decided = ev.Decided(engine.facts.engine_id, life.block_set.set_id, reason)
        asked = lf.ReleaseAsked(for_room=reason is not Reason.SUPERSEDED, why=_WHY[reason])
        return [decided, *self._held.step(engine, life, asked, now)]

    def _renew(self, engine: Engine, now: float) -> list[ev.Effect]:
        at, facts, limits = self._held.instant(engine, now), engine.facts, self._held.limits
        ending = (engine.lives[set_id] for set_id in engine.schedule.ending(at, threshold_s(facts, limits)))
        due = [life for life in ending if engine.renewals.due(life, at, facts, limits)]
        effects: list[ev.Effect] = []
        for start in range(0, len(due), MAX_PER_MESSAGE):
            ids = tuple(life.block_set.set_id for life in due[start : start + MAX_PER_MESSAGE])
            effects.append(ev.SendRenewal(facts.engine_id, ids))
        for life in due:
            engine.renewals.sent(life, at)
            set_id = life.block_set.set_id
            reason = Reason.UNCONFIRMED if engine.renewals.in_vain(set_id) else Reason.RENEWED
            effects.append(ev.Decided(facts.engine_id, set_id, reason))
        return effects

    def _kept(self, engine: Engine, life: Life, at: Instant) -> Kept:
        held = life.block_set
        return Kept(
            set_id=held.set_id,
            crowd=self._held.conversations.crowd_of(SetName(engine.facts.engine_id, held.set_id), held.scope),
            token_count=held.token_count,
            block_count=max(1, engine.budget.alone(held.set_id)),
            age_s=_age_s(life, at),
        )


def _age_s(life: Life, at: Instant) -> float:
    """Returns the time since a set's turn ended, at the most; 0 while the engine's clock is unknown."""
    return max(0.0, at.latest - life.block_set.ended_at) if math.isfinite(at.latest) else 0.0
