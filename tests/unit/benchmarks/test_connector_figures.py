"""What the connector costs is what its hooks take more than those of vLLM's own, hook by hook."""

from typing import Any

import pytest

from benchmarks.connector.clocked import HOOKS, HookClock, HookTimes, figures
from benchmarks.connector.figures import problems, summed_up


def measured(arm: str, step_us: float = 5.0, longest_us: float = 10.0, **more: Any) -> dict[str, Any]:
    hooks_us = {"on_new_request": 5.0, "build_connector_meta": longest_us}
    of_turn = {"turn_us": 90.0, "busiest_us": 20.0, "waited_us": 30.0, "steps": 64}
    return {"arm": arm, "tokens": 1024, "step_us": step_us, "hooks_us": hooks_us, **of_turn, **more}


class Connector:
    """Has the hooks, one of which fails."""

    def __getattr__(self, name: str) -> Any:
        if name not in HOOKS:
            raise AttributeError(name)
        return lambda *args, **kwargs: (name, args, kwargs)

    def update_connector_output(self, output: object) -> None:
        raise RuntimeError("no output")


def test_every_call_of_a_hook_is_timed_and_answers_as_before() -> None:
    connector: Any = Connector()
    clock = HookClock(connector)

    assert connector.on_new_request(1, two=2) == ("on_new_request", (1,), {"two": 2})
    with pytest.raises(RuntimeError, match="no output"):
        connector.update_connector_output(None)

    times = clock.take()
    assert set(times.longest) == {"on_new_request", "update_connector_output"}
    assert times.processor_s >= max(times.longest.values()) > 0
    assert clock.take() == HookTimes()


def test_a_turns_figures_are_sums_over_its_steps_and_its_longest_calls() -> None:
    steps = [HookTimes() for _ in range(3)]
    for step, (spent, waited) in zip(steps, [(1e-6, 1e-6), (2e-6, 9e-6), (3e-6, 3e-6)], strict=True):
        step.add("on_new_request", waited, spent)

    made = figures(steps, steps[1:], turn_count=2)

    assert made["step_us"] == pytest.approx(2.5)
    assert made["turn_us"] == pytest.approx(3.0)
    assert (made["busiest_us"], made["waited_us"]) == (pytest.approx(3.0), pytest.approx(9.0))
    assert made["hooks_us"] == pytest.approx({**dict.fromkeys(HOOKS, 0.0), "on_new_request": 3.0})


def test_rounds_come_to_their_medians_beside_those_of_vllms_own_connector() -> None:
    rounds = [measured("stock", step_us=value) for value in (4.0, 5.0, 90.0)]
    rounds += [measured("absent", step_us=value, longest_us=value) for value in (14.0, 15.0, 16.0)]

    stock, absent = summed_up(rounds)

    assert (stock["rounds"], stock["step_us"], stock["added_step_us"]) == (3, 5.0, 0.0)
    assert (absent["arm"], absent["step_us"], absent["added_step_us"]) == ("absent", 15.0, 10.0)
    assert (absent["hook"], absent["added_longest_us"], absent["longest_us"]) == ("build_connector_meta", 5.0, 15.0)
    assert "share" not in absent


def test_the_share_is_of_the_engines_own_step() -> None:
    rounds = [measured("stock", engine_step_us=1000.0), measured("absent", step_us=10.0, engine_step_us=9000.0)]

    assert summed_up(rounds)[1]["share"] == pytest.approx(0.005)


def test_a_call_that_takes_too_long_and_a_step_that_is_too_much_longer_are_problems() -> None:
    stock = measured("stock", engine_step_us=1000.0)
    fine = measured("present", step_us=14.9, longest_us=1010.0, engine_step_us=1000.0)
    late = measured("slow", longest_us=1010.1, engine_step_us=1000.0)
    heavy = measured("absent", step_us=15.1, engine_step_us=1000.0)

    found = problems(summed_up([stock, fine, late, heavy]))

    assert [problem.split(":")[0] for problem in found] == [
        "engine, 1024 tokens, agent slow",
        "engine, 1024 tokens, agent absent",
    ]
