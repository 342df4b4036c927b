"""Takes what legs show into the figures that estimates rest on."""

from collections.abc import Sequence

from backhaul_connector.wire import Verdict
from backhaul_router.core.expectation import Expectation
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.demand import Demand, Prefix
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.target import Target
from backhaul_router.core.routing.tokens import TokenRates

_DISTINCT = 4.0
"""From how many times on one time can be told from another one."""


class Learning:
    """What is learnt from each leg that went well."""

    def __init__(self, *, costs: Costs, prefixes: Prefixes, rates: TokenRates) -> None:
        self._costs = costs
        self._prefixes = prefixes
        self._rates = rates

    def prefilled(
        self,
        target: Target,
        demand: Demand,
        *,
        byte_count: int,
        token_count: int,
        verdict: Verdict | None,
        seconds: float,
    ) -> None:
        """A prefill engine answered after ``seconds`` of its own time.

        ``token_count`` is what it counted, 0 when unknown; ``verdict`` says more, where there is the connector.
        """
        token_count = token_count or demand.token_count
        local, read = self._prefixes.cached(target.key, demand.prefixes), 0
        if verdict is not None:
            local, read = verdict.local, verdict.read
            self._prefixes.correct(target, demand.prefixes, local=local)
        self._costs.note_prefill(target.key, computed=_computed(token_count, local + read), read=read, seconds=seconds)
        self._rates.note(demand.model, byte_count, token_count)
        self._prefixes.note(target, _exact(demand.prefixes, token_count))

    def decoded(self, target: Target, demand: Demand, *, seconds: float) -> None:
        """A decode engine that was handed the prompt's blocks began to answer after ``seconds``."""
        moved = self.decoding(target, demand, handed_off=True)
        self._costs.note_decode(target.key, moved=moved, seconds=seconds)
        self._prefixes.note(target, demand.prefixes)

    def appended(self, target: Target, demand: Demand, *, seconds: float) -> None:
        """A decode engine that was handed nothing began to answer after ``seconds`` of its own time."""
        computed = self.decoding(target, demand, handed_off=False)
        if self._had_lost(target, demand, computed, seconds):
            held = demand.held_by(target)
            self._prefixes.correct(target, demand.prefixes, local=held)
            computed = _computed(demand.token_count, held)
        self._costs.note_alone(target.key, computed=computed, seconds=seconds)
        self._prefixes.note(target, demand.prefixes)

    def decoding(self, target: Target, demand: Demand, *, handed_off: bool) -> int:
        """Returns the tokens by which the time of a decode leg goes: those moved to it, or those that it computes."""
        had = self._prefixes.had(target, demand)
        return max(0, demand.token_count - had) if handed_off else _computed(demand.token_count, had)

    def answered(self, target: Target, demand: Demand) -> None:
        """A decode engine has the prompt; somebody will tell how long it took to begin."""
        self._prefixes.note(target, demand.prefixes)

    def told(self, expectation: Expectation, *, seconds: float) -> None:
        """Somebody tells that a decode engine began to answer after ``seconds``."""
        key = expectation.node_id, expectation.engine_id
        if expectation.handed_off:
            self._costs.note_decode(key, moved=expectation.token_count, seconds=seconds)
        elif expectation.share is not None:
            served_s = expectation.share * seconds
            self._costs.note_alone(key, computed=expectation.token_count, seconds=served_s)

    def _had_lost(self, target: Target, demand: Demand, computed: int, seconds: float) -> bool:
        """Tells whether an engine took as long as if it had cached nothing of what it was thought to have.

        Nobody counts for it, and what other routers send there takes room too.
        """
        whole = _computed(demand.token_count, demand.held_by(target))
        if whole == computed:
            return False
        short_s, long_s = (self._costs.alone_s(target.key, computed=count) for count in (computed, whole))
        return long_s > _DISTINCT * short_s and seconds * seconds > short_s * long_s


def _computed(token_count: int, had: int) -> int:
    """An engine computes one token at the least: without it there is nothing to go on from."""
    return max(1, token_count - had)


def _exact(prefixes: Sequence[Prefix], token_count: int) -> tuple[Prefix, ...]:
    """Puts the true count of the whole prompt in place of the estimated one, the others in proportion."""
    if not prefixes or prefixes[0].token_count <= 0:
        return tuple(prefixes)
    share = token_count / prefixes[0].token_count
    return tuple(Prefix(prefix.key, round(prefix.token_count * share)) for prefix in prefixes)
