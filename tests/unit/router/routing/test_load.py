"""What runs on each target, and how long it will be busy."""

import math
import random
from contextlib import ExitStack

import pytest

from backhaul_router.core.load import RECENT_S, Load
from backhaul_router.core.routing.target import targets_of
from tests.unit.router.routing.served import Now, Router, Wait, in_steps, one_by_one, prompts, watch
from tests.unit.router.routing.targets import target

P1, P2 = target("p1"), target("p2")


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def load(now: Now) -> Load:
    return Load(now)


# Counts


def test_legs_count_while_they_run(load: Load) -> None:
    with load.running(P1), load.running(P1, expected_s=1.0), load.running(P2):
        assert (load.count(P1.key), load.count(P2.key), load.total) == (2, 1, 3)
    assert (load.count(P1.key), load.count(P2.key), load.total) == (0, 0, 0)


def test_a_leg_counts_out_once_on_whatever_path(load: Load) -> None:
    def fail() -> None:
        with load.running(P1, expected_s=1.0) as work:
            work.served()
            work.served()
            raise ZeroDivisionError

    with load.running(P1) as other:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert (load.count(P1.key), load.total) == (1, 1)
        other.served()
    assert load.total == 0


def test_engines_of_one_node_count_apart(load: Load) -> None:
    node = target("p1", engines=(target("p1").node.engines[0], target("p2").node.engines[0])).node
    first, second = targets_of([node])
    with load.running(first, expected_s=2.0):
        assert (load.count(first.key), load.count(second.key)) == (1, 0)
        assert (load.wait_s(first.key), load.wait_s(second.key)) == (2.0, 0.0)


def test_legs_that_are_served_or_merely_take_a_hand_off_do_not_queue(load: Load) -> None:
    with load.running(P1), load.running(P1, expected_s=1.0) as work:
        assert load.queued(P1.key) == 1
        work.served()
        assert load.queued(P1.key) == 0
        assert load.count(P1.key) == 2


def test_the_most_legs_that_ran_are_known_for_two_seconds(load: Load, now: Now) -> None:
    with load.running(P1):
        with load.running(P1), load.running(P1):
            pass
        now.value = 0.99 * RECENT_S
        assert load.recent(P1.key) == 3
        now.value = RECENT_S
        assert load.recent(P1.key) == 1
    now.value += 0.99 * RECENT_S
    assert load.recent(P1.key) == 1
    assert load.recent(P2.key) == 0


# Waits


def test_the_wait_is_what_all_that_was_sent_is_expected_to_take(load: Load, now: Now) -> None:
    with load.running(P1, expected_s=2.0), load.running(P1, expected_s=3.0), load.running(P1):
        now.value = 1.0
        assert load.wait_s(P1.key) == 4.0
    assert load.wait_s(P1.key) == 0.0


def test_work_that_is_done_early_leaves_only_what_comes_after_it(load: Load, now: Now) -> None:
    with load.running(P1, expected_s=2.0) as first, load.running(P1, expected_s=3.0):
        now.value = 0.5
        first.served()
        assert load.wait_s(P1.key) == 3.0


def test_work_that_is_overdue_counts_as_about_to_end(load: Load, now: Now) -> None:
    with load.running(P1, expected_s=2.0) as first:
        now.value = 10.0
        assert load.wait_s(P1.key) == 0.0
        with load.running(P1, expected_s=3.0):
            assert load.wait_s(P1.key) == 3.0
            now.value = 11.0
            first.served()
            assert load.wait_s(P1.key) == 3.0


def test_work_that_is_given_up_in_the_queue_leaves_the_rest_as_it_was(load: Load, now: Now) -> None:
    with load.running(P1, expected_s=2.0), ExitStack() as second:
        second.enter_context(load.running(P1, expected_s=3.0))
        now.value = 1.0
        second.close()
        assert load.wait_s(P1.key) == 1.0


def test_work_that_is_given_up_while_it_is_computed_makes_way_for_the_next(load: Load, now: Now) -> None:
    with ExitStack() as first:
        first.enter_context(load.running(P1, expected_s=2.0))
        with load.running(P1, expected_s=3.0) as second:
            now.value = 1.0
            first.close()
            assert load.wait_s(P1.key) == 3.0
            now.value = 4.5
            assert second.served() == 3.5


@pytest.mark.parametrize("expected_s", [math.nan, -1.0, 0.0, math.inf, 1e300])
def test_no_expectation_spoils_the_wait(load: Load, now: Now, expected_s: float) -> None:
    with load.running(P1, expected_s=expected_s), load.running(P1, expected_s=1.0):
        assert 1.0 <= load.wait_s(P1.key) <= 3601.0
    assert load.wait_s(P1.key) == 0.0
    with load.running(P1, expected_s=1.0):
        assert load.wait_s(P1.key) == 1.0


def test_nodes_that_have_left_are_forgotten_but_for_what_still_runs(load: Load) -> None:
    with load.running(P1, expected_s=1.0) as work, load.running(P2, expected_s=1.0):
        load.forget({"p2"})
        assert (load.wait_s(P1.key), load.wait_s(P2.key)) == (0.0, 1.0)
        assert load.count(P1.key) == 1
        work.served()
    assert load.total == 0


# Service times


def test_a_leg_is_served_from_when_it_was_sent_or_the_one_before_was_done(load: Load, now: Now) -> None:
    now.value = 1.0
    with load.running(P1, expected_s=1.0) as first:
        now.value = 2.0
        with load.running(P1, expected_s=1.0) as second:
            now.value = 4.0
            assert first.served() == 3.0
            now.value = 4.5
            assert second.served() == 0.5
            now.value = 9.0
            assert (first.served(), second.served()) == (3.0, 0.5)


def test_a_leg_that_is_served_out_of_turn_leaves_the_rest_of_the_time_to_the_one_before(load: Load, now: Now) -> None:
    with load.running(P1, expected_s=4.0) as first, load.running(P1, expected_s=1.0) as second:
        now.value = 1.0
        assert second.served() == 1.0
        assert load.wait_s(P1.key) == 3.0
        now.value = 3.0
        assert first.served() == 2.0


def test_a_leg_is_served_for_its_share_of_the_time_where_others_have_legs_before_it(load: Load, now: Now) -> None:
    with load.running(P1, expected_s=1.0, others=3) as first, load.running(P1, expected_s=1.0, others=2) as second:
        now.value = 4.0
        assert first.served() == 1.0
        now.value = 6.0
        assert second.served() == 1.0


def test_a_hand_off_is_taken_beside_whatever_is_computed(load: Load, now: Now) -> None:
    with load.running(P1, others=5) as one, load.running(P1) as other, load.running(P1, expected_s=1.0) as work:
        now.value = 2.0
        assert (one.served(), work.served()) == (2.0, 2.0)
        now.value = 2.5
        assert other.served() == 2.5


# Against engines


@pytest.fixture
def router(now: Now) -> Router:
    return Router(now)


def learnt(router: Router) -> tuple[float, float]:
    """Returns what a prompt costs besides its tokens, and what each token costs."""
    short, long = (router.costs.prefill_s(P1.key, computed=count, read=0) for count in (2000, 6000))
    per_token = (long - short) / 4000
    return short - 2000 * per_token, per_token


def bias(waits: list[Wait]) -> float:
    """Returns the part by which waits are foreseen too long, all taken together."""
    return sum(wait.foreseen_s for wait in waits) / sum(wait.real_s for wait in waits) - 1


def miss(waits: list[Wait]) -> float:
    """Returns how far waits are foreseen wrongly on average, as a part of them."""
    return sum(abs(wait.foreseen_s - wait.real_s) for wait in waits) / sum(wait.real_s for wait in waits)


@pytest.mark.parametrize("per_s", [0.2, 1.5, 2.2], ids=["idle", "busy", "crowded"])
@pytest.mark.parametrize("seed", range(3))
def test_costs_learnt_under_a_queue_are_those_of_the_engine(now: Now, router: Router, seed: int, per_s: float) -> None:
    rng = random.Random(seed)
    sent = prompts(rng, count=400, per_s=per_s, tokens=(100, 8000))
    watch(one_by_one(sent, lambda n: (0.1 + n * 1e-4) * rng.uniform(0.95, 1.05)), P1, now, router)
    each, per_token = learnt(router)
    assert per_token == pytest.approx(1e-4, rel=0.1)
    assert each == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("per_s", [1.0, 2.0, 3.0], ids=["busy", "crowded", "too much"])
@pytest.mark.parametrize("seed", range(3))
def test_waits_are_foreseen(now: Now, router: Router, seed: int, per_s: float) -> None:
    rng = random.Random(seed)
    sent = prompts(rng, count=300, per_s=per_s, tokens=(100, 8000))
    waits = watch(one_by_one(sent, lambda n: (0.02 + n * 1e-4) * rng.lognormvariate(0, 0.1)), P1, now, router)
    assert miss(waits[20:]) < 0.2


@pytest.mark.parametrize("seed", range(3))
def test_waits_are_foreseen_where_a_step_computes_many_prompts(now: Now, router: Router, seed: int) -> None:
    sent = prompts(random.Random(seed), count=400, per_s=20.0, tokens=(200, 1000))
    waits = watch(in_steps(sent, lambda n: 0.02 + n * 1e-4, budget=8192), P1, now, router)
    assert len(waits) > 300
    assert abs(bias(waits[100:])) < 0.2


def test_eight_prompts_of_one_step_cost_an_eighth_each(now: Now, router: Router) -> None:
    sent = [(step * 0.4, 500) for step in range(20) for _ in range(8)]
    watch(in_steps(sent, lambda n: n * 1e-4, budget=4000), P1, now, router)
    assert 8 * router.costs.prefill_s(P1.key, computed=500, read=0) == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize("routers", [2, 4])
@pytest.mark.parametrize("per_s", [1.8, 2.2], ids=["busy", "crowded"])
def test_waits_are_foreseen_roughly_where_routers_share_an_engine(now: Now, routers: int, per_s: float) -> None:
    sent = prompts(random.Random(1), count=1000, per_s=per_s, tokens=(100, 8000))
    jobs = one_by_one(sent, lambda n: 0.02 + n * 1e-4)
    waits = watch(jobs, P1, now, *(Router(now) for _ in range(routers)))
    assert miss(waits[100:]) < 0.4
    assert abs(bias(waits[100:])) < 0.35
