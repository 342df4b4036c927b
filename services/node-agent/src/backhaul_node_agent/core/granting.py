"""Claims: when a set is granted, and how a grant ends unused.

A grant needs the node's own lease valid by the agent's clock, a connector that is connected and has replayed all, a
trusted engine clock, equal weights digests, and a node that is not draining; what the set itself must be like stands in
`life`.
"""

from dataclasses import dataclass

from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.claim_book import SetName
from backhaul_node_agent.core.holdings import Holdings


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What a router asks for."""

    request_id: str
    set_id: str
    engine_id: str
    scope: str
    weights_digest: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A claim that may be answered, once the connector has been told and `confirm` agreed."""

    name: SetName
    block_set: BlockSet
    deadline: float
    """Engine's clock."""
    ttl_s: float
    """Time until then, at the least."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no grant."""

    reason: str
    message: str


class Granting:
    """Grants sets and takes grants back."""

    def __init__(self, holdings: Holdings) -> None:
        self._held = holdings

    def claim(self, request: ClaimRequest, now: float) -> tuple[Grant | Refusal, list[ev.Effect]]:
        """Grants a set, or says why not.

        The grant must be given up (`abandon`) unless the connector was told and `confirm` agreed.
        """
        if self._held.claims.returned(request.request_id, now):
            return Refusal("CLAIM_RETURNED", "a return with this request_id came first"), []
        name = SetName(request.engine_id, request.set_id)
        earlier = self._held.claims.holder(request.request_id)
        if earlier is not None and earlier != name:
            return Refusal("REQUEST_ID_REUSED", "the request_id claimed another block set"), []
        refusal = self._may_not_grant(request, now)
        if refusal is not None:
            return refusal, []
        if earlier is not None:
            return self._grant_of(name, now), [ev.TellClaimed(name.engine_id, name.set_id)]
        engine = self._held.engines[name.engine_id]
        life = engine.lives[name.set_id]
        asked = lf.ClaimAsked(request.request_id)
        outcome = lf.step(life, asked, self._held.instant(engine, now), self._held.limits)
        if outcome.refusal:
            return Refusal(outcome.refusal, _MESSAGES[outcome.refusal]), []
        effects = self._held.take(engine, name.set_id, life, outcome, now)
        self._held.claims.add(request.request_id, name)
        return self._grant_of(name, now), effects

    def confirm(self, request: ClaimRequest, now: float) -> Refusal | None:
        """Tells whether a grant may be answered now: None, and it counts as answered, or why not."""
        if self._held.claims.holder(request.request_id) != SetName(request.engine_id, request.set_id):
            return Refusal("CLAIM_RETURNED", "the claim was taken back meanwhile")
        refusal = self._may_not_grant(request, now)
        if refusal is None:
            self._held.claims.mark_answered(request.request_id)
        return refusal

    def abandon(self, request_id: str, now: float) -> list[ev.Effect]:
        """Takes back a grant that was never answered; one that another call with the same id answered stays."""
        return [] if self._held.claims.answered(request_id) else self._take_back(request_id, now)

    def give_back(self, request_id: str, now: float) -> list[ev.Effect]:
        """Takes back a claim that its router returned, and remembers the return."""
        effects = self._take_back(request_id, now)
        self._held.claims.mark_returned(request_id, now)
        return effects

    def _take_back(self, request_id: str, now: float) -> list[ev.Effect]:
        name = self._held.claims.holder(request_id)
        return [] if name is None else self._held.step_known(name.engine_id, [name.set_id], lf.ClaimReturned(), now)

    def _may_not_grant(self, request: ClaimRequest, now: float) -> Refusal | None:
        if self._held.draining:
            return Refusal("DRAINING", "the node is being drained")
        if now >= self._held.valid_until:
            return Refusal("LEASE_INVALID", "the node's lease is not valid")
        engine = self._held.engines.get(request.engine_id)
        if engine is None:
            return Refusal("SET_UNKNOWN", "the engine is not (or no longer) here")
        life = engine.lives.get(request.set_id)
        if life is None or life.block_set.scope != request.scope:
            return Refusal("SET_UNKNOWN", _MESSAGES["SET_UNKNOWN"])
        if not request.weights_digest or request.weights_digest != engine.facts.weights_digest:
            return Refusal("WEIGHTS_MISMATCH", "the engines' weights are not known to be equal")
        if not engine.connected or not engine.clock.trusted:
            return Refusal("CONNECTOR_AWAY", "the engine's connector is not connected, or its clock is not known yet")
        return None

    def _grant_of(self, name: SetName, now: float) -> Grant:
        engine = self._held.engines[name.engine_id]
        life = engine.lives[name.set_id]
        assert life.claim is not None
        remaining = max(0.0, life.claim.deadline - self._held.instant(engine, now).latest)
        return Grant(name, life.block_set, life.claim.deadline, remaining)


_MESSAGES = {
    "SET_UNKNOWN": "the block set was read, released, expired or never was",
    "SET_CLAIMED": "the block set is granted to another request",
    "SET_FENCED": "the block set was found after a restart and may still be granted",
    "SET_EXPIRING": "too little time is left for a read",
}
