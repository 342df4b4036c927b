"""The benchmark of real engines runs on simulated ones: caches are lost when they are to be, and arms go their ways."""

from pathlib import Path

import pytest

from backhaul_local.options import StackOptions
from backhaul_local.progress import SilentSteps
from backhaul_local.simulated import SimulatedEngine
from benchmarks.engines.cases import Case
from benchmarks.engines.report import document, problems
from benchmarks.engines.run import Plan, run

pytestmark = pytest.mark.timeout(300)

FAST = ("--prefill-tokens-per-s", "20000", "--decode-step-s", "0.001")


def test_every_arm_plays_every_case_and_says_the_same(tmp_path: Path) -> None:
    cases = [
        Case(name=name, history_tokens=400, reply_tokens=40, turns=2, lost=name == "lost") for name in ("kept", "lost")
    ]
    plan, engine = Plan(cases=cases, rounds=1), SimulatedEngine(flags=FAST, ttl_s=480)
    options = StackOptions(state=tmp_path, prefill=[engine], decode=[engine], routers=0)
    results = run(plan, options, SilentSteps(), lambda *_: None)
    report = document(plan, results, engines="simulated", simulated=True, seconds=1.0)
    assert problems(report) == []
    kept, lost = (report["cases"][name]["arms"] for name in ("kept", "lost"))
    assert kept["one-way"]["routes"] == lost["one-way"]["routes"] == {"cold": 1}
    assert lost["warm"]["routes"] == {"warm": 1}
    local = {name: results[name, "one-way"].conversations[0][1].local_tokens for name in ("kept", "lost")}
    assert local["kept"] > 300
    assert local["lost"] == 0
