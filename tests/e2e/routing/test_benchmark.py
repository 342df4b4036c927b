"""The routing benchmark runs, and its clients get the model's own texts. What it measures no test can hold it to."""

import json
from pathlib import Path

import pytest

from backhaul_local.progress import SilentSteps
from benchmarks.routing.arms import ARMS
from benchmarks.routing.loads import LOADS
from benchmarks.routing.report import document, save
from benchmarks.routing.run import Plan, run

pytestmark = pytest.mark.timeout(300)


def test_every_arm_plays_the_same_turns_and_takes_its_own_routes(tmp_path: Path) -> None:
    plan = Plan(seed=1, loads=("agents",), arms=ARMS, rounds=1, duration_s=3.0)
    report = document(plan, run(plan, tmp_path, SilentSteps(), lambda *_: None), seconds=1.0)
    save(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report
    arms = report["loads"]["agents"]["arms"]
    assert [(arm["failures"], arm["wrong_texts"]) for arm in arms.values()] == [({}, 0)] * 4
    played = LOADS["agents"].conversations("1 0", duration_s=3.0)
    assert {arm["turn_count"] for arm in arms.values()} == {sum(len(each.turns) for each in played)}
    assert {name: "append" in arm["routes"] for name, arm in arms.items()} == {
        "auto": True,
        "cold": False,
        "warm": False,
        "append": True,
    }
    assert "warm" in arms["warm"]["routes"]
    assert arms["cold"]["routes"] == {"cold": 1.0}
