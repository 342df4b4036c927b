"""Loads that are drawn: equal seeds give equal ones, and every kind has its shape."""

from statistics import fmean, median

import pytest

from backhaul_simulator import tokens
from benchmarks.routing.clusters import CLUSTERS, PREFILL
from benchmarks.routing.loads import KINDS, LOADS, Conversation, Passage


def drawn(load: str, *, seed: str = "s", duration_s: float = 200.0) -> tuple[Conversation, ...]:
    return LOADS[load].conversations(seed, duration_s=duration_s)


@pytest.mark.parametrize("load", LOADS)
def test_equal_seeds_give_equal_loads(load: str) -> None:
    assert drawn(load) == drawn(load)
    assert drawn(load) != drawn(load, seed="t")


def test_loads_of_one_seed_are_different_ones() -> None:
    assert len({drawn(load) for load in LOADS}) == len(LOADS)


@pytest.mark.parametrize("load", LOADS)
def test_conversations_come_in_their_order_and_at_their_rate(load: str) -> None:
    arrivals = [conversation.arrival_s for conversation in drawn(load, duration_s=1_000.0)]
    assert arrivals == sorted(arrivals)
    assert 0.0 < arrivals[0] < arrivals[-1] < 1_000.0
    assert len(arrivals) == pytest.approx(1_000 * sum(LOADS[load].per_s.values()), rel=0.2)


def test_a_longer_load_begins_with_the_shorter_one() -> None:
    short = drawn("chat", duration_s=20.0)
    assert drawn("chat", duration_s=60.0)[: len(short)] == short


@pytest.mark.parametrize("load", LOADS)
def test_every_conversation_fits_into_every_engine(load: str) -> None:
    memory = PREFILL.block_count * 64
    for conversation in drawn(load, duration_s=1_000.0):
        said = sum(turn.says.word_count + turn.answer_tokens for turn in conversation.turns)
        assert conversation.system.word_count + said < memory


@pytest.mark.parametrize(("kind", "load"), [("chat", "chat"), ("agent", "agents"), ("document", "documents")])
def test_a_kind_has_its_shape(kind: str, load: str) -> None:
    shape, conversations = KINDS[kind], drawn(load, duration_s=1_000.0)
    assert {conversation.kind for conversation in conversations} == {kind}
    assert {conversation.system.word_count for conversation in conversations} == {*shape.systems}
    counts = [len(conversation.turns) for conversation in conversations]
    assert (min(counts), max(counts)) == shape.turns
    turns = [turn for conversation in conversations for turn in conversation.turns]
    first = [conversation.turns[0] for conversation in conversations]
    later = [turn for conversation in conversations for turn in conversation.turns[1:]]
    assert {turn.pause_s for turn in first} == {0.0}
    assert median(turn.says.word_count for turn in first) == pytest.approx(shape.first[0], rel=0.2)
    assert median(turn.answer_tokens for turn in turns) == pytest.approx(shape.answer[0], rel=0.1)
    assert median(turn.pause_s for turn in later) == pytest.approx(shape.pause_s[0], rel=0.1)
    assert max(turn.says.word_count for turn in turns) <= shape.longest


def test_something_long_is_brought_to_some_later_turns_about_documents() -> None:
    later = [turn for conversation in drawn("documents", duration_s=1_000.0) for turn in conversation.turns[1:]]
    long = [turn.says.word_count > 500 for turn in later]
    assert fmean(long) == pytest.approx(KINDS["document"].pasted_share, abs=0.08)


def test_a_mixed_load_has_all_kinds() -> None:
    assert {conversation.kind for conversation in drawn("mixed")} == {*KINDS}


def test_every_load_has_its_engines() -> None:
    assert {load.cluster for load in LOADS.values()} == {*CLUSTERS}


def test_a_passage_is_its_name_s_text_and_a_token_per_word() -> None:
    passage = Passage("a", 50)
    assert passage.text == Passage("a", 50).text
    assert passage.text.startswith(Passage("a", 20).text)
    assert passage.text != Passage("b", 50).text
    assert len(tokens.encode(passage.text)) == 50


def test_what_is_said_is_said_once_and_opens_as_others_do() -> None:
    conversations = drawn("agents")
    said = [turn.says.name for conversation in conversations for turn in conversation.turns]
    assert len(said) == len({*said})
    assert len({conversation.system for conversation in conversations}) == len(KINDS["agent"].systems)
