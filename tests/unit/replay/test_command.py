"""The command: what it reads, prints and refuses."""

import json
from pathlib import Path

import pytest

from backhaul_replay.__main__ import main

TURNS = [
    {"conversation": "a", "arrival_s": 0, "prompt_tokens": 1_000, "output_tokens": 10},
    {"conversation": "a", "gap_s": 5, "prompt_tokens": 1_200, "output_tokens": 10},
    {"conversation": "b", "arrival_s": 60, "prompt_tokens": 500, "output_tokens": 10},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TURNS)))
    return path


def test_it_prints_a_line_for_each_policy_and_says_what_the_bound_is(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trace), "--block-count", "100"]) == 0
    shown = capsys.readouterr().out
    for policy in ("fixed 480 s, no limit", "fixed 480 s", "lru", "benefit", "lru + cached", "benefit + cached"):
        assert sum(line.startswith(f"{policy}  ") for line in shown.splitlines()) == 1
    assert "50 blocks (50% of all)" in shown
    assert "linear relaxation" in shown


def test_it_says_what_is_played_on_what(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--block-size", "64", "--block-count", "100"]) == 0
    shown = capsys.readouterr().out
    assert f"Trace:  {trace}; 2 conversations of 3 turns, 60 s until the last arrival\n" in shown
    assert "Engine: 100 blocks of 64 tokens; per second 20,000 tokens computed, 400,000 read" in shown


def test_turns_that_are_left_out_and_a_draw_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TURNS[:2])))
    for flags in ([], ["--json"]):
        assert main([str(path), *flags]) == 0
        shown = capsys.readouterr()
        said = shown.err if flags else shown.out
        assert "2 of 2 turns are left out" in said
        assert "benefit saves no more than lru here" in said


def test_tokens_saved_by_pins_and_by_second_chances_are_added_up(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trace), "--block-size", "64", "--block-count", "30", "--retained-share", "0"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("benefit + cached")]
    pinned, cached, both = line.split()[5:8]
    assert (pinned, cached, both) == ("0", "960", "960")


def test_gaps_are_learnt_on_a_drawn_trace_only(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--learn-seed", "1"]) == 2
    assert "--learn-seed is for drawn traces" in capsys.readouterr().err


def test_it_says_what_is_at_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--decode-step-s DECODE_STEP_S seconds between two tokens of an answer (0.02)" in " ".join(
        capsys.readouterr().out.split()
    )


def test_it_says_what_it_is_at_apart_from_what_it_prints(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--json"]) == 0
    shown = capsys.readouterr()
    assert "playing benefit ..." in shown.err
    json.loads(shown.out)


def test_it_prints_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--block-count", "100", "--json"]) == 0
    by_policy = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["policies"]}
    assert by_policy["benefit"]["pinned_tokens_saved"] == 1_009
    assert by_policy["benefit"]["most_tokens"] == pytest.approx(1_009)
    assert by_policy["fixed 480 s, no limit"]["most_tokens"] is None


def test_it_writes_a_drawn_trace_that_it_reads_again(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    assert main(["--synthetic", "chats", "--seed", "3", "--write", str(path)]) == 0
    assert len(path.read_text().splitlines()) > 1_000


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        pytest.param("{", [], "trace.jsonl: line 1: not JSON", id="a bad line"),
        pytest.param(
            json.dumps(TURNS[0]), ["--block-size", "256", "--block-count", "1"], "never fits", id="too little memory"
        ),
        pytest.param(json.dumps(TURNS[0]), ["--block-size", "0"], "block_size must be", id="hardware"),
        pytest.param(json.dumps(TURNS[0]), ["--retained-share", "1.5"], "share must be", id="share"),
        pytest.param(json.dumps(TURNS[0]), ["--pressure-mark", "nan"], "mark must be", id="mark"),
        pytest.param(json.dumps(TURNS[0]), ["--max-retention-s", "0"], "max_retention_s must be", id="retention"),
    ],
)
def test_what_cannot_be_is_said_and_ends_it(
    text: str, flags: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert main([str(path), *flags]) == 2
    assert problem in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_without_a_trace_it_draws_agents(tmp_path: Path) -> None:
    paths = [tmp_path / "given.jsonl", tmp_path / "drawn.jsonl"]
    assert main(["--seed", "3", "--write", str(paths[0])]) == 0
    assert main(["--synthetic", "agents", "--seed", "3", "--write", str(paths[1])]) == 0
    assert paths[0].read_text() == paths[1].read_text()
