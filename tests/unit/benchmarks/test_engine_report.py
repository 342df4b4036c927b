"""What the benchmark of real engines plays, and what its report finds to be wrong."""

from collections.abc import Sequence
from typing import Any

import pytest

from backhaul_local.conversation import Turn
from benchmarks.engines.cases import ARMS, LONG_TOKENS, Case, cases
from benchmarks.engines.figures import speedup
from benchmarks.engines.report import document, problems
from benchmarks.engines.run import Plan, Seen

CASE = Case(name="lost, 4000 + 100", history_tokens=4000, reply_tokens=100, turns=3, lost=True, target=15.0)


def turn(ttft_s: float, text: str = "so") -> Turn:
    return Turn(route="warm", miss_reason="", prompt_tokens=10, local_tokens=0, read_tokens=8, ttft_s=ttft_s, text=text)


def report(
    one_way: Sequence[float],
    backhaul: Sequence[float],
    *,
    text: str = "so",
    others: float = 0.1,
    simulated: bool = False,
) -> dict[str, Any]:
    played = [turn(each) for each in one_way]
    seen = {arm.name: Seen(conversations=[played], busy=[(0.5, 0.5 + others)]) for arm in ARMS}
    seen["backhaul"].conversations = [[turn(each, text) for each in backhaul]]
    results = {(CASE.name, arm): of_arm for arm, of_arm in seen.items()}
    return document(Plan(cases=[CASE], rounds=1), results, engines="some", simulated=simulated, seconds=1.0)


def test_the_first_turn_of_a_conversation_does_not_count() -> None:
    ratios = report([9.0, 6.0, 6.0], [0.1, 0.3, 0.3])["cases"][CASE.name]["ratios"]
    assert ratios["backhaul"]["value"] == pytest.approx(20.0)
    assert ratios["warm"]["value"] == pytest.approx(1.0)


@pytest.mark.parametrize(("ttft_s", "simulated", "found"), [(0.4, False, 0), (0.5, False, 1), (0.5, True, 0)])
def test_a_target_that_real_engines_miss_is_told(ttft_s: float, simulated: bool, found: int) -> None:
    told = problems(report([6.0] * 3, [ttft_s] * 3, simulated=simulated))
    assert told == [f"{CASE.name}: the first token is there 12.00 times as soon, not 15"] * found


def test_answers_that_differ_between_arms_are_told() -> None:
    told = problems(report([6.0] * 3, [0.1] * 3, text="other"))
    assert told == [f"{CASE.name}: 3 answers differ between arms"]


def test_a_machine_that_others_used_is_told() -> None:
    assert "provisional" in problems(report([6.0] * 3, [0.1] * 3, others=0.5))[0]


def test_a_case_that_some_arm_has_not_played_is_left_out() -> None:
    results = {(CASE.name, arm.name): Seen() for arm in ARMS}
    left = document(Plan(cases=[CASE], rounds=1), results, engines="", simulated=False, seconds=1.0)
    assert left["cases"] == {}
    assert problems(left) == []


def test_a_conversation_that_failed_is_told_and_its_case_is_none_that_all_have_played() -> None:
    results = {(CASE.name, arm.name): Seen(conversations=[[turn(1.0)] * 3], busy=[(0.5, 0.5)]) for arm in ARMS}
    results[CASE.name, "warm"] = Seen(failures=["no answer"], busy=[(0.5, 0.5)])
    left = document(Plan(cases=[CASE], rounds=1), results, engines="", simulated=False, seconds=1.0)
    assert left["cases"] == {}
    assert problems(left) == [f"{CASE.name}, warm: a conversation failed: no answer"]


def test_every_case_has_a_name_of_its_own_and_long_ones_without_a_cache_the_highest_target() -> None:
    every = [*cases([1000, LONG_TOKENS], [100, 400], turns=3)]
    assert len({case.name for case in every}) == len(every)
    assert {case.name for case in every if case.target == 15.0} == {"lost, 4000 + 100"}
    assert all(case.target == 2.5 for case in every if not case.lost and case.reply_tokens >= 100)


def test_a_speedup_is_the_less_sure_the_more_turns_differ() -> None:
    sure, unsure = speedup([1.0] * 8, [2.0] * 8), speedup([1.0, 0.5, 2.0, 1.0], [2.0, 1.0, 4.0, 2.0])
    assert sure.value == unsure.value == 2.0
    assert (sure.low, sure.high) == (2.0, 2.0)
    assert unsure.low < 1.5
    assert unsure.high > 2.5
