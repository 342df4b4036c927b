"""What docs/retention.md says of the policies, on drawn traces that a pool cannot hold.

Priors and thresholds were chosen on seed 1; these are other seeds. Each trace is 90 minutes of turns.
"""

from dataclasses import dataclass

import pytest

from backhaul_replay import synthetic
from backhaul_replay.agent import Budget
from backhaul_replay.bound import most_tokens
from backhaul_replay.hardware import Hardware
from backhaul_replay.policies import contenders
from backhaul_replay.replay import Outcome, replay
from backhaul_replay.trace import Trace

pytestmark = pytest.mark.timeout(400)

_DURATION_S = 5_400.0
_FIXED, _UNLIMITED = "fixed 480 s", "fixed 480 s, no limit"


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, an engine that cannot hold it, and the budgets."""

    trace: Trace
    hardware: Hardware
    fixed: Budget
    learnt: Budget
    """Of lru and benefit: at most the same."""
    outcomes: dict[str, Outcome]

    @property
    def most_tokens(self) -> float:
        """Returns the bound, by the greater budget."""
        intervals = self.outcomes["benefit"].intervals
        return most_tokens(intervals, int(self.hardware.block_count * self.fixed.share))


def _case(trace: Trace, hardware: Hardware, fixed: Budget, learnt: Budget) -> Case:
    outcomes = {}
    for contender in contenders(1_800.0):
        if not contender.second_chance:
            budget = fixed if contender.name in (_FIXED, _UNLIMITED) else learnt
            outcomes[contender.name] = replay(trace, contender, hardware, budget)
    return Case(trace, hardware, fixed, learnt, outcomes)


@pytest.fixture(scope="module")
def agents() -> Case:
    trace = synthetic.agents(4, duration_s=_DURATION_S)
    return _case(trace, Hardware(block_size=2048, block_count=2_000), Budget(), Budget())


@pytest.fixture(scope="module")
def chats() -> Case:
    # Chats are small beside the pool: a small reserve is enough. What a fixed time refuses leaves gaps, which the
    # others fill: with one percent less they pin no more than it does.
    trace = synthetic.chats(2, duration_s=_DURATION_S)
    hardware = Hardware(block_size=128, block_count=1_900)
    return _case(trace, hardware, Budget(0.9, 0.92), Budget(0.89, 0.91))


@pytest.fixture(params=["agents", "chats"])
def case(request: pytest.FixtureRequest) -> Case:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Case)
    return found


def test_benefit_saves_1_3_times_what_a_fixed_time_saves_and_pins_no_more(case: Case) -> None:
    benefit, fixed = case.outcomes["benefit"], case.outcomes[_FIXED]
    assert benefit.pinned_tokens >= 1.3 * fixed.pinned_tokens
    assert benefit.tally.pinned_block_s <= fixed.tally.pinned_block_s


def test_benefit_saves_85_percent_of_what_the_future_would_tell(case: Case) -> None:
    assert 0.85 * case.most_tokens <= case.outcomes["benefit"].pinned_tokens <= case.most_tokens


@pytest.mark.parametrize("policy", ["lru", "benefit"])
def test_no_decode_waits_for_what_is_kept(case: Case, policy: str) -> None:
    tally = case.outcomes[policy].tally
    assert (tally.delayed, tally.delayed_s) == (0, 0.0)


def test_without_a_limit_a_fixed_time_delays_decodes_by_minutes_and_saves_less_by_the_hour(case: Case) -> None:
    benefit, unlimited = case.outcomes["benefit"], case.outcomes[_UNLIMITED]
    assert unlimited.tally.delayed > unlimited.turns / 2
    assert unlimited.tally.delayed_s > 10 * unlimited.tally.delayed
    assert benefit.tally.pinned_block_s <= unlimited.tally.pinned_block_s
    assert benefit.pinned_tokens >= 1.2 * unlimited.pinned_tokens


def test_with_agents_it_saves_1_3_times_less_without_a_limit(agents: Case) -> None:
    assert agents.outcomes["benefit"].pinned_tokens >= 1.3 * agents.outcomes[_UNLIMITED].pinned_tokens
