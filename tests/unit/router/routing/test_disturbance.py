"""What computing a prompt costs the answers that an engine is giving: only what a hand-off would not cost them."""

from contextlib import ExitStack

import pytest

from backhaul_router.core.load import Load
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.estimates import Estimator
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.reports import Reports
from tests.fakes.clock import FakeClock
from tests.unit.router.routing.targets import demand, target

D1 = target("d1")
ANSWER_S, TOKEN_S = 0.03, 0.001


def costs(clock: FakeClock) -> Costs:
    """Returns what is known of an engine that takes 30 ms to answer, and 1 ms for each token of the prompt."""
    known = Costs(clock.monotonic)
    for computed in (1, 50, 200, 1000) * 10:
        known.note_alone(D1.key, computed=computed, seconds=ANSWER_S + TOKEN_S * computed)
    return known


@pytest.mark.parametrize("new", [10, 200])
def test_answers_wait_for_the_prompt_s_tokens_and_not_for_the_answer_to_it(new: int) -> None:
    clock = FakeClock()
    load = Load(clock.monotonic)
    estimator = Estimator(load, costs(clock), Prefixes(), Reports(clock.monotonic), disturbance=0.1)
    asked = demand(holder=D1, token_count=800 + new)
    assert estimator.append(asked).penalty_s == 0.0
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(load.running(D1))
        estimate = estimator.append(asked)
    assert estimate.prefill_s == pytest.approx(ANSWER_S + TOKEN_S * new, rel=0.2)
    assert estimate.penalty_s == pytest.approx(0.1 * 5 * TOKEN_S * new, rel=0.3)
