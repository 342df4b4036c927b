"""Turns as their router logged them."""

import json
from pathlib import Path

from benchmarks.routing.turn_log import Estimated, TurnLog


def line(**fields: object) -> str:
    return json.dumps({"event": "turn", **fields}) + "\n"


def test_turns_are_told_once_and_only_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    path.write_text(line(estimate_ms=1.0, ttft_ms=1.0))
    log = TurnLog(path)
    assert log.turns() == []
    second = line(estimate_ms=30.0, ttft_ms=50.0)
    with path.open("a") as file:
        file.write(line(estimate_ms=10.0, ttft_ms=20.0) + second[:20])
    assert log.turns() == [Estimated(0.01, 0.02)]
    with path.open("a") as file:
        file.write(second[20:])
    assert log.turns() == [Estimated(0.03, 0.05)]


def test_turns_without_an_answer_and_other_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    path.touch()
    log = TurnLog(path)
    path.write_text(line(estimate_ms=1.0, ttft_ms=None) + "Traceback\n[1]\n" + json.dumps({"event": "other"}) + "\n")
    assert log.turns() == []
