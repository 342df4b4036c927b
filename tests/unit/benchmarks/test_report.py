"""What a report finds to be wrong."""

from typing import Any

import pytest

from benchmarks.routing.report import problems


def arm(**figures: Any) -> dict[str, Any]:
    return {"failures": {}, "wrong_texts": 0, "machine_cpu_share": 0.3, **figures}


def report(load: str, *, ratio: float = 0.9, **figures: Any) -> dict[str, Any]:
    ratios = {"append": {"value": ratio, "low": 0.0, "high": 2.0}}
    return {"loads": {load: {"arms": {"auto": arm(**figures), "append": arm()}, "ratios": ratios}}}


@pytest.mark.parametrize(
    ("load", "ratio", "found"),
    [
        ("chat", 1.05, []),
        ("chat", 1.06, ["chat: 1.060 times the time of always append"]),
        ("mixed", 0.99, []),
        ("mixed", 1.01, ["mixed: 1.010 times the time of always append"]),
    ],
)
def test_a_little_worse_is_allowed_but_where_loads_are_mixed(load: str, ratio: float, found: list[str]) -> None:
    assert problems(report(load, ratio=ratio)) == found


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"failures": {"hung": 2}}, "chat, auto: 2 turns failed: hung"),
        ({"wrong_texts": 1}, "chat, auto: 1 wrong texts"),
        ({"machine_cpu_share": 0.9}, "chat, auto: 90% of the cores were busy"),
    ],
)
def test_what_spoils_a_run_is_told(figures: dict[str, Any], found: str) -> None:
    assert problems(report("chat", **figures)) == [found]
