"""What the agent counts, and what is read of its owner whenever metrics are."""

from collections.abc import Callable, Sequence

from backhaul_common.clock import Clock
from backhaul_common.metering import Counter, Histogram, Values, observe
from backhaul_node_agent import instruments
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.owner import Owner

_RENEWALS = (ev.Reason.RENEWED, ev.Reason.UNCONFIRMED)


class AgentObserver:
    """Counts what goes through the agent."""

    def __init__(self) -> None:
        self._claims = Counter(instruments.CLAIMS)
        self._renewals = Counter(instruments.RENEWALS)
        self._confirmed = Counter(instruments.CONFIRMED)
        self._publishing = Histogram(instruments.PUBLISH_DURATION)

    def granted(self) -> None:
        """A claim was granted."""
        self._claims.add(1, instruments.GRANTED)

    def refused(self, reason: str) -> None:
        """A claim was not."""
        self._claims.add(1, reason.lower())

    def confirmed(self, event: ev.DeadlinesConfirmed) -> None:
        """An engine moved deadlines."""
        self._confirmed.add(len(event.deadlines))

    def published(self, lags_s: Sequence[float]) -> None:
        """Sets can be found, each so long after it was reported."""
        for lag_s in lags_s:
            self._publishing.record(lag_s)

    def decided(self, decided: ev.Decided) -> None:
        """Something became of a set."""
        if decided.reason in _RENEWALS:
            self._renewals.add(1)


def observe_owner(owner: Owner, clock: Clock, *, ready: Callable[[], bool], foreign: Callable[[], int]) -> None:
    """Has the owner looked at whenever metrics are read; ``foreign`` counts leases that are not its sets'."""
    observe(instruments.READY, lambda: {(): ready()})
    observe(instruments.LEASE, lambda: {(): owner.lease_valid(clock.monotonic())})
    observe(instruments.CONNECTORS, lambda: {(): sum(map(owner.connected, _ids(owner)))})
    observe(instruments.BLOCKS, lambda: {(): owner.memory().block_count})
    observe(instruments.FREE_BLOCKS, lambda: _known(owner.memory().free_count))
    observe(instruments.RETAINED_BLOCKS, lambda: {(): owner.memory().retained_count})
    observe(instruments.BUDGET_BLOCKS, lambda: {(): owner.memory().budget_count})
    observe(
        instruments.BLOCK_SETS,
        lambda: {(state.name.lower(),): count for state, count in owner.state_counts().items()},
    )
    observe(instruments.UNPUBLISHED, lambda: {(): owner.unpublished_count})
    observe(instruments.RELEASES, lambda: {(why.value,): count for why, count in owner.tally.releases.items()})
    observe(instruments.ENDS, lambda: {(end.value,): count for end, count in owner.tally.ends.items()})
    observe(instruments.FOREIGN_LEASES, lambda: {(): foreign()})


def _known(value: float | None) -> Values:
    return {} if value is None else {(): value}


def _ids(owner: Owner) -> list[str]:
    return [facts.engine_id for facts in owner.engines()]
