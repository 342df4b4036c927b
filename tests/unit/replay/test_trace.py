"""Traces: what is accepted, what is refused and how, and what the drawn ones look like."""

import json
from statistics import median

import pytest

from backhaul_replay import synthetic
from backhaul_replay.trace import Trace, TraceError, Turn, parse, render

FIRST = {"conversation": "a", "prompt_tokens": 100, "output_tokens": 10, "arrival_s": 1.5, "scope": "s"}
NEXT = {"conversation": "a", "prompt_tokens": 200, "output_tokens": 10, "gap_s": 2, "scope": "s"}


def _lines(*turns: dict[str, object]) -> list[str]:
    return [json.dumps(turn) for turn in turns]


def _turns(trace: Trace) -> list[Turn]:
    return [turn for conversation in trace.conversations for turn in conversation.turns]


def test_turns_are_read_in_their_order_and_empty_lines_are_none() -> None:
    (conversation,) = parse([*_lines(FIRST), "", " \n", *_lines(NEXT)]).conversations
    assert [turn.prompt_tokens for turn in conversation.turns] == [100, 200]
    assert conversation.arrival_s == 1.5
    assert conversation.turns[1].gap_s == 2.0


def test_a_trace_ends_with_the_last_arrival_that_it_names() -> None:
    assert parse(_lines(FIRST, NEXT, {**FIRST, "conversation": "b", "arrival_s": 7})).end_s == 7.0


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        pytest.param([], "no turns", id="nothing"),
        pytest.param(["{"], "line 1: not JSON", id="not JSON"),
        pytest.param(["[1]"], "line 1: an object is expected", id="no object"),
        pytest.param(_lines(FIRST, {**NEXT, "tokens": 1}), "line 2: unknown field 'tokens'", id="unknown field"),
        pytest.param(_lines({**FIRST, "conversation": ""}), "conversation must be a text", id="no name"),
        pytest.param(_lines({**FIRST, "scope": 3}), "scope must be a text", id="scope"),
        pytest.param(_lines({**FIRST, "prompt_tokens": 0}), "prompt_tokens must be a whole", id="no tokens"),
        pytest.param(_lines({**FIRST, "prompt_tokens": 1.5}), "prompt_tokens must be a whole", id="half a token"),
        pytest.param(_lines({**FIRST, "output_tokens": True}), "output_tokens must be a whole", id="no number"),
        pytest.param(_lines({**FIRST, "arrival_s": -1}), "must be a number of seconds from 0", id="negative"),
        pytest.param(['{"conversation":"a","prompt_tokens":1,"output_tokens":1,"arrival_s":NaN}'], "number", id="NaN"),
        pytest.param(_lines({**FIRST, "arrival_s": 10**400}), "must be a number of seconds", id="beyond all floats"),
        pytest.param(["[" * 100_000], "line 1: not JSON", id="nested too deeply"),
        pytest.param(_lines(NEXT), "line 1: the first turn of a conversation needs arrival_s", id="no beginning"),
        pytest.param(_lines(FIRST, {**NEXT, "arrival_s": 9}), "line 2: a turn has arrival_s or gap_s", id="both"),
        pytest.param(_lines(FIRST, {**FIRST, "arrival_s": None}), "line 2: a turn needs arrival_s or", id="neither"),
        pytest.param(_lines(FIRST, {**FIRST, "arrival_s": 1}), "line 2: arrival_s 1.0 is before", id="backwards"),
        pytest.param(_lines(FIRST, {**NEXT, "scope": "t"}), "line 2: all turns of a conversation", id="two scopes"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(lines: list[str], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        parse(lines)


@pytest.mark.parametrize("shape", synthetic.SHAPES)
def test_a_drawn_trace_is_the_same_for_a_seed_and_another_for_another(shape: str) -> None:
    draw = synthetic.SHAPES[shape]
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert parse(render(draw(1))) == draw(1)


@pytest.mark.parametrize("seed", range(1, 5))
def test_agents_are_as_published(seed: int) -> None:
    trace = synthetic.agents(seed, duration_s=7_200.0, sessions_per_hour=200)
    turns = _turns(trace)
    gaps = [turn.gap_s for turn in turns if turn.gap_s is not None]
    assert median(len(conversation.turns) for conversation in trace.conversations) == pytest.approx(43, rel=0.2)
    assert median(turn.prompt_tokens for turn in turns) == pytest.approx(142_000, rel=0.1)
    assert median(turn.output_tokens for turn in turns) == pytest.approx(444, rel=0.1)
    assert median(gaps) < 3.0
    assert 0.02 < sum(gap > 60 for gap in gaps) / len(gaps) < 0.1


@pytest.mark.parametrize("seed", range(1, 5))
def test_chats_are_short_and_slow_and_many_do_not_return(seed: int) -> None:
    trace = synthetic.chats(seed)
    turns = _turns(trace)
    lengths = [len(conversation.turns) for conversation in trace.conversations]
    assert 0.58 < sum(length == 1 for length in lengths) / len(lengths) < 0.68
    assert 1_000 < median(turn.prompt_tokens for turn in turns) < 3_000
    assert median(turn.gap_s for turn in turns if turn.gap_s is not None) == pytest.approx(82, rel=0.15)


def test_tenants_of_chats_differ_in_how_many_come_back() -> None:
    returning: dict[str, list[bool]] = {}
    for conversation in synthetic.chats(1).conversations:
        returning.setdefault(conversation.turns[0].scope, []).append(len(conversation.turns) > 1)
    shares = {scope: sum(each) / len(each) for scope, each in returning.items()}
    assert shares["programs"] < 0.06 < 0.5 < shares["office"] < shares["assistant"]
