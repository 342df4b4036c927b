"""Turns in virtual time: what is kept, what is saved by it, and who waits for it."""

import dataclasses
import json
from typing import Any

import pytest

from backhaul_node_agent.core.retention.gaps import Gaps
from backhaul_replay.agent import Budget
from backhaul_replay.hardware import Hardware
from backhaul_replay.policies import Contender, contenders
from backhaul_replay.replay import Outcome, replay
from backhaul_replay.trace import Trace, parse

HARDWARE = Hardware(
    block_size=100, block_count=100, prefill_tokens_per_s=1_000.0, transfer_tokens_per_s=1e6, decode_step_s=0.01
)
ALL = {contender.name: contender for contender in contenders(1_800.0)}
KEEPERS = ["fixed 480 s, no limit", "fixed 480 s", "lru", "benefit"]


def _trace(*turns: tuple[str, float, int], end_s: float = 3_600.0) -> Trace:
    """Makes a trace of (conversation, arrival, prompt tokens) with answers of 100 tokens."""
    fields = ("conversation", "arrival_s", "prompt_tokens")
    trace = parse(json.dumps(dict(zip(fields, turn, strict=True)) | {"output_tokens": 100}) for turn in turns)
    return dataclasses.replace(trace, end_s=end_s)


def _play(name: str, trace: Trace, *, hardware: Hardware = HARDWARE, budget: Budget | None = None) -> Outcome:
    return replay(trace, ALL[name], hardware, budget or Budget())


@pytest.mark.parametrize("name", KEEPERS)
def test_a_turn_that_returns_soon_saves_all_that_was_computed_before(name: str) -> None:
    outcome = _play(name, _trace(("a", 0, 1_000), ("a", 60, 1_200)))
    assert (outcome.turns, outcome.returns, outcome.pinned_hits) == (2, 1, 1)
    assert outcome.pinned_tokens == 1_099, "the last token of an answer is not computed"


@pytest.mark.parametrize(("name", "hits"), [("fixed 480 s", 0), ("fixed 480 s, no limit", 0), ("lru", 1)])
def test_a_fixed_time_ends_however_much_is_free(name: str, hits: int) -> None:
    outcome = _play(name, _trace(("a", 0, 1_000), ("a", 600, 1_200)))
    assert outcome.pinned_hits == hits


def test_a_set_is_pinned_from_its_turns_end_until_it_was_read() -> None:
    outcome = _play("lru", _trace(("a", 0, 1_000), ("a", 60, 1_200), end_s=61))
    # Prefill takes a second, the answer another one; reading 1,099 tokens takes a millisecond.
    assert outcome.tally.pinned_block_s == pytest.approx(11 * 58, rel=0.01)
    assert outcome.tally.peak_pinned == 11


@pytest.mark.parametrize("name", KEEPERS)
def test_a_history_that_was_cut_saves_nothing(name: str) -> None:
    outcome = _play(name, _trace(("a", 0, 1_000), ("a", 60, 900), ("a", 120, 1_200)))
    assert outcome.pinned_hits == 1
    assert outcome.pinned_tokens == 999


def test_when_the_budget_is_full_lru_gives_up_the_oldest_and_a_fixed_time_refuses_the_newest() -> None:
    turns = [(name, 10.0 * number, 2_000) for number, name in enumerate("abc")]
    returns = [(name, 100.0 + number, 2_200) for number, name in enumerate("abc")]
    saved = {name: _play(name, _trace(*turns, *returns[:1])).pinned_hits for name in ("fixed 480 s", "lru")}
    assert saved == {"fixed 480 s": 1, "lru": 0}
    saved = {name: _play(name, _trace(*turns, *returns[2:])).pinned_hits for name in ("fixed 480 s", "lru")}
    assert saved == {"fixed 480 s": 0, "lru": 1}


@pytest.mark.parametrize("name", ["fixed 480 s", "lru", "benefit"])
def test_the_budget_holds(name: str) -> None:
    turns = [(str(number), 5.0 * number, 1_500) for number in range(40)]
    outcome = _play(name, _trace(*turns))
    # At most 16 blocks more, for the time of a look and a release.
    assert outcome.tally.peak_pinned <= 50 + 16
    assert outcome.tally.pinned_block_s <= 50 * 3_600


def test_without_a_limit_turns_wait_until_pinned_blocks_expire() -> None:
    turns = [(str(number), 5.0 * number, 3_000) for number in range(5)]
    outcome = _play("fixed 480 s, no limit", _trace(*turns))
    # A turn computes for three seconds and answers for one: the fourth one begins when the first one's set expires, the
    # fifth one when the second one's does.
    assert outcome.turns == 5
    assert outcome.tally.delayed == 2
    assert outcome.tally.delayed_s == pytest.approx(2 * (480 + 4 - (15 + 3)), abs=0.1)


def test_within_the_budget_the_same_turns_wait_for_nothing() -> None:
    turns = [(str(number), 5.0 * number, 3_000) for number in range(4)]
    outcome = _play("lru", _trace(*turns))
    assert (outcome.tally.delayed, outcome.tally.waited_s) == (0, 0.0)


def test_waiting_for_others_that_run_is_no_delay_by_what_is_kept() -> None:
    turns = [(str(number), 0.0, 6_000) for number in range(2)]
    outcome = _play("fixed 480 s", _trace(*turns), budget=Budget(share=0.0))
    assert outcome.turns == 2
    assert outcome.tally.waited_s > 0.9
    assert outcome.tally.delayed <= 1, "what ended is pinned until the agent has looked and released it"
    assert outcome.tally.delayed_s <= HARDWARE.look_s + HARDWARE.release_s + 1e-6


def test_the_latest_request_gives_way_when_answers_need_more_blocks() -> None:
    line = '{"conversation":"%s","arrival_s":0,"prompt_tokens":4900,"output_tokens":400}'
    trace = dataclasses.replace(parse([line % "a", line % "b"]), end_s=100.0)
    outcome = _play("lru", trace)
    assert outcome.tally.preemptions >= 1
    assert outcome.turns == 2


def test_released_blocks_are_found_until_others_write_over_them() -> None:
    turns = [("a", 0.0, 3_000), ("b", 10.0, 3_000), ("a", 60.0, 3_200)]
    tight = Budget(share=0.4)
    assert _play("lru", _trace(*turns), budget=tight).cached_hits == 0
    outcome = _play("lru + cached", _trace(*turns), budget=tight)
    assert (outcome.pinned_hits, outcome.cached_hits) == (0, 1)
    assert outcome.cached_tokens == 3_000, "full blocks only"


@pytest.mark.parametrize(("others", "hits"), [(1, 1), (2, 0), (3, 0)])
def test_less_than_half_of_a_turn_is_not_asked_for(others: int, hits: int) -> None:
    turns = [("a", 0.0, 3_000), ("b", 10.0, 3_000), ("a", 60.0, 3_200)]
    between = [(str(number), 20.0 + number / 100, 3_000) for number in range(others)]
    outcome = _play("lru + cached", _trace(*turns[:2], *between, *turns[2:]), budget=Budget(share=0.4))
    assert outcome.cached_hits == hits


def test_a_turn_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="a turn of 10001 tokens never fits"):
        _play("lru", _trace(("a", 0, 9_901)))


def test_what_is_learnt_is_there_for_the_next_trace() -> None:
    gaps = Gaps()
    replay(_trace(("a", 0, 1_000), ("a", 60, 1_200)), ALL["benefit"], HARDWARE, Budget(), gaps=gaps)
    assert "" in gaps


def test_a_contender_does_not_learn_from_the_future() -> None:
    """What has happened by a time is the same whatever comes after it."""
    turns = [(str(number % 7), 11.0 * number, 500 + 200 * (number // 7)) for number in range(60)]
    whole = _play("benefit", _trace(*turns, end_s=300.0))
    cut = _play("benefit", _trace(*(turn for turn in turns if turn[1] <= 300.0), end_s=300.0))
    assert whole == cut


@pytest.mark.parametrize("field", ["block_size", "block_count", "prefill_tokens_per_s", "transfer_tokens_per_s"])
def test_hardware_that_cannot_be_is_refused_by_name(field: str) -> None:
    impossible: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=field):
        Hardware(**impossible)


def test_names_of_contenders_differ() -> None:
    every: list[Contender] = contenders(60.0)
    assert len({contender.name for contender in every}) == len(every)
