"""How long a turn takes by each route."""

from contextlib import ExitStack

import pytest

from backhaul_router.core.load import RECENT_S
from backhaul_router.core.routing.demand import Leg, Prefix
from backhaul_router.core.routing.estimates import Estimate
from backhaul_router.core.routing.reports import EngineReport
from backhaul_router.core.routing.target import Target
from tests.unit.router.routing.served import Now, Router
from tests.unit.router.routing.targets import demand, target

P, P2, D, D2 = target("p1"), target("p2"), target("d1"), target("d2")
OPENING = (Prefix("whole", 1000), Prefix("opening", 600))


def prefill_s(computed: int, read: int = 0) -> float:
    return 0.02 + computed * 5e-5 + read * 5e-6


def decode_s(moved: int) -> float:
    return 0.02 + moved * 5e-6


def alone_s(computed: int) -> float:
    return 0.02 + computed * 5e-5


class Desk(Router):
    """A router whose legs are never served."""

    def __init__(self) -> None:
        self.now = Now()
        super().__init__(self.now)
        self.stack = ExitStack()

    def send(self, to: Target, *, expected_s: float = 0.0) -> None:
        """Sends a leg."""
        self.stack.enter_context(self.load.running(to, expected_s=expected_s))

    def report(self, of: Target, *, running: int = 0, waiting: int = 0) -> None:
        """Takes an agent's word."""
        self.reports.take(of.key, EngineReport(running, waiting, 0.0))


@pytest.fixture
def router() -> Desk:
    return Desk()


def seconds(estimate: Estimate) -> list[float]:
    """Returns its parts."""
    return [estimate.wait_s, estimate.prefill_s, estimate.move_s, estimate.penalty_s]


def near(*expected: float) -> object:
    return pytest.approx(expected, abs=1e-9)


# Routes


def test_an_estimate_is_the_sum_of_its_parts() -> None:
    assert Estimate(1.0, 2.0, 4.0, 8.0).total_s == 15.0


def test_cold_computes_all_and_moves_all(router: Desk) -> None:
    estimate = router.estimator.cold(demand(holder=D2), P, D)
    assert seconds(estimate) == near(0, prefill_s(1000), decode_s(1000), 0)


def test_cold_spares_what_either_engine_has(router: Desk) -> None:
    router.prefixes.note(P, OPENING[1:])
    router.prefixes.note(D, OPENING)
    estimate = router.estimator.cold(demand(prefixes=OPENING), P, D)
    assert seconds(estimate) == near(0, prefill_s(400), decode_s(0), 0)


def test_cold_to_the_holder_moves_only_what_it_lacks(router: Desk) -> None:
    assert router.estimator.cold(demand(holder=D), P, D).move_s == pytest.approx(decode_s(200))


def test_warm_reads_what_is_held_and_computes_the_rest(router: Desk) -> None:
    estimate = router.estimator.warm(demand(holder=D), P)
    assert seconds(estimate) == near(0, prefill_s(200, 800), decode_s(200), 0)


def test_warm_reads_only_what_prefill_has_not_cached(router: Desk) -> None:
    router.prefixes.note(P, OPENING[1:])
    estimate = router.estimator.warm(demand(holder=D, prefixes=OPENING), P)
    assert estimate.prefill_s == pytest.approx(prefill_s(200, 200))


def test_warm_reads_nothing_where_prefill_has_more_than_is_held(router: Desk) -> None:
    router.prefixes.note(P, OPENING)
    estimate = router.estimator.warm(demand(holder=D, prefixes=OPENING), P)
    assert estimate.prefill_s == pytest.approx(prefill_s(1, 0))


def test_append_computes_what_the_holder_lacks(router: Desk) -> None:
    assert seconds(router.estimator.append(demand(holder=D))) == near(0, alone_s(200), 0, 0)


def test_alone_computes_what_is_not_cached(router: Desk) -> None:
    router.prefixes.note(D, OPENING[1:])
    assert seconds(router.estimator.alone(demand(prefixes=OPENING), D)) == near(0, alone_s(400), 0, 0)
    assert seconds(router.estimator.alone(demand(prefixes=OPENING), D2)) == near(0, alone_s(1000), 0, 0)


def test_a_token_is_computed_even_where_all_are_there(router: Desk) -> None:
    for where in (P, D):
        router.prefixes.note(where, OPENING)
    asked = demand(prefixes=OPENING)
    assert router.estimator.cold(asked, P, D).prefill_s == pytest.approx(prefill_s(1))
    assert router.estimator.alone(asked, D).prefill_s == pytest.approx(alone_s(1))


def test_more_may_be_held_or_cached_than_the_prompt_is_estimated_to_have(router: Desk) -> None:
    router.prefixes.note(P, OPENING)
    asked = demand(holder=D, token_count=700, prefixes=OPENING)
    assert seconds(router.estimator.warm(asked, P)) == near(0, prefill_s(1), decode_s(0), 0)
    assert seconds(router.estimator.append(asked)) == near(0, alone_s(1), 0, 0)


def test_routes_to_a_holder_need_one(router: Desk) -> None:
    with pytest.raises(ValueError, match="no engine holds"):
        router.estimator.warm(demand(), P)
    with pytest.raises(ValueError, match="no engine holds"):
        router.estimator.append(demand())


# Waits and penalties


def test_a_prompt_waits_for_what_this_router_sent_before_it(router: Desk) -> None:
    router.send(P, expected_s=2.0)
    router.send(D, expected_s=3.0)
    asked = demand(holder=D)
    assert router.estimator.append(asked).wait_s == pytest.approx(3.0)
    assert router.estimator.cold(asked, P, D2).wait_s == pytest.approx(2.0)
    assert router.estimator.cold(asked, P2, D2).wait_s == 0.0


def test_decode_works_off_its_queue_while_prefill_computes(router: Desk) -> None:
    router.send(P, expected_s=2.0)
    router.send(D, expected_s=2.01)
    assert router.estimator.warm(demand(holder=D), P).wait_s == pytest.approx(2.0)
    router.send(D, expected_s=1.0)
    estimate = router.estimator.warm(demand(holder=D), P)
    assert estimate.total_s == pytest.approx(3.01 + decode_s(200))


def test_a_prompt_waits_for_what_others_have_there(router: Desk) -> None:
    router.report(P, running=2, waiting=3)
    assert router.estimator.cold(demand(), P, D2).wait_s == pytest.approx(5 * prefill_s(1000))
    router.report(D, running=9, waiting=1)
    for _ in range(5):
        router.costs.note_alone(D.key, computed=1000, seconds=0.5)
    assert router.estimator.alone(demand(), D).wait_s == pytest.approx(0.5, rel=0.1)


def test_what_this_router_has_there_does_not_count_twice(router: Desk) -> None:
    for _ in range(4):
        router.send(P, expected_s=0.5)
    router.report(P, running=1, waiting=3)
    assert router.estimator.cold(demand(), P, D).wait_s == pytest.approx(2.0)
    router.report(P, running=1, waiting=7)
    assert router.estimator.cold(demand(), P, D).wait_s == pytest.approx(2.0 + 4 * prefill_s(1000))
    for _ in range(6):
        router.send(D)
    router.report(D, running=6, waiting=2)
    assert router.estimator.alone(demand(), D).wait_s == pytest.approx(2 * 2 / 8 * alone_s(1000))


def test_a_report_of_legs_that_have_just_ended_is_no_sign_of_others(router: Desk) -> None:
    for _ in range(4):
        router.send(P, expected_s=0.5)
    router.report(P, running=1, waiting=3)
    router.stack.close()
    assert router.estimator.cold(demand(), P, D).wait_s == 0.0
    router.now.value += RECENT_S
    assert router.estimator.cold(demand(), P, D).wait_s > 0.0


def test_computing_a_prompt_is_dearer_the_more_answers_it_disturbs(router: Desk) -> None:
    for _ in range(3):
        router.send(D)
    router.send(D, expected_s=1.0)
    assert router.estimator.append(demand(holder=D)).penalty_s == pytest.approx(0.1 * 3 * 200 * 5e-5)
    router.report(D, running=20)
    assert router.estimator.alone(demand(), D).penalty_s == pytest.approx(0.1 * 20 * 1000 * 5e-5)
    assert router.estimator.alone(demand(), D2).penalty_s == 0.0


# Legs


@pytest.mark.parametrize("busy", [False, True])
def test_legs_are_estimated_as_in_the_routes_that_they_make(router: Desk, busy: bool) -> None:
    if busy:
        router.send(P, expected_s=2.0)
        router.send(D)
        router.send(D, expected_s=1.0)
    router.prefixes.note(P, OPENING[1:])
    asked = demand(holder=D, prefixes=OPENING)
    wait_s = {P: 2.0, D: 1.0} if busy else {P: 0.0, D: 0.0}
    leg_s = router.estimator.leg_s
    assert leg_s(asked, Leg.PREFILL, P) == pytest.approx(wait_s[P] + prefill_s(400))
    assert leg_s(asked, Leg.READ, P) == pytest.approx(wait_s[P] + prefill_s(200, 200))
    assert leg_s(asked, Leg.DECODE, D) == pytest.approx(wait_s[D] + decode_s(200))
    assert leg_s(asked, Leg.DECODE, D2) == pytest.approx(decode_s(1000))
    assert leg_s(asked, Leg.ALONE, D) == pytest.approx(router.estimator.append(asked).total_s)
    assert leg_s(asked, Leg.ALONE, D2) == pytest.approx(alone_s(1000))


def test_a_route_that_nobody_tried_is_chosen_over_a_dear_one_until_it_is_known(router: Desk) -> None:
    asked = demand(holder=D)
    for _ in range(5):
        router.costs.note_prefill(P.key, computed=200, read=800, seconds=0.5)
    assert router.estimator.append(asked).total_s < router.estimator.warm(asked, P).total_s
    for _ in range(2):
        router.costs.note_alone(D.key, computed=200, seconds=2.0)
    assert router.estimator.append(asked).total_s > router.estimator.warm(asked, P).total_s
