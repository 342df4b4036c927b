"""What docs/retention.md says of the policies, on drawn traces that a pool cannot hold.

What the agent knows of gaps it has learnt on seed 1; pools and budgets were chosen on seeds 2 to 11; the figures are of
others. Each trace is 90 minutes of turns.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import pytest

from backhaul_node_agent.core.retention.gaps import Gaps
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
_COMPARED = {each.name: each for each in contenders(1_800.0) if not each.second_chance}


@dataclass(frozen=True, slots=True)
class Load:
    """A kind of trace, an engine that cannot hold it, and the budgets."""

    draw: Callable[[int], Trace]
    hardware: Hardware
    fixed: Budget
    learning: Budget
    """Of lru and benefit: at most the same."""

    def play(self, policy: str, seed: int, gaps: Gaps) -> Outcome:
        budget = self.fixed if policy.startswith("fixed") else self.learning
        return replay(self.draw(seed), _COMPARED[policy], self.hardware, budget, gaps=gaps)


_LOADS = {
    "agents": Load(
        lambda seed: synthetic.agents(seed, duration_s=_DURATION_S),
        Hardware(block_size=8192, block_count=1_500),
        Budget(),
        Budget(),
    ),
    # Chats are small beside the pool: a small reserve is enough. What a fixed time refuses leaves gaps, which the
    # others fill: with a little less they pin no more than it does.
    "chats": Load(
        lambda seed: synthetic.chats(seed, duration_s=_DURATION_S),
        Hardware(block_size=128, block_count=5_400),
        Budget(0.9, 0.92),
        Budget(0.885, 0.905),
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One trace under every policy."""

    outcomes: dict[str, Outcome]
    most_tokens: float
    """The bound, by the greater budget."""


@pytest.fixture(scope="module", params=[(name, seed) for name in _LOADS for seed in (12, 13)], ids=lambda it: f"{it}")
def case(request: pytest.FixtureRequest) -> Case:
    name, seed = request.param
    load, learnt = _LOADS[name], Gaps()
    load.play("benefit", 1, learnt)
    outcomes = {policy: load.play(policy, seed, deepcopy(learnt)) for policy in _COMPARED}
    most = int(load.hardware.block_count * load.fixed.share)
    return Case(outcomes, most_tokens(outcomes["benefit"].intervals, most))


@pytest.mark.parametrize("fixed", [_FIXED, _UNLIMITED])
def test_benefit_saves_1_3_times_what_a_fixed_time_saves_and_pins_no_more(case: Case, fixed: str) -> None:
    benefit, other = case.outcomes["benefit"], case.outcomes[fixed]
    assert benefit.pinned_tokens >= 1.3 * other.pinned_tokens
    assert benefit.tally.pinned_block_s <= other.tally.pinned_block_s


def test_benefit_saves_85_percent_of_what_the_future_would_tell(case: Case) -> None:
    assert 0.85 * case.most_tokens <= case.outcomes["benefit"].pinned_tokens <= case.most_tokens


@pytest.mark.parametrize("policy", ["lru", "benefit"])
def test_no_decode_waits_for_what_is_kept(case: Case, policy: str) -> None:
    tally = case.outcomes[policy].tally
    assert (tally.delayed, tally.delayed_s) == (0, 0.0)


def test_without_a_limit_a_fixed_time_delays_decodes_by_minutes(case: Case) -> None:
    unlimited = case.outcomes[_UNLIMITED]
    assert unlimited.tally.delayed > unlimited.turns / 3
    assert unlimited.tally.delayed_s > 10 * unlimited.tally.delayed
