"""What an engine caches, by its events: against a naive model of an engine, and by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul_node_agent.core.cached import Cached, Change, Cleared, Removed, Stored

BLOCK = 2
Prefix = tuple[str, tuple[int, ...]]
"""A salt, and all tokens up to the end of a block."""


@dataclass
class NaiveEngine:
    """Knows its blocks by all tokens up to their end; the same prefix may be there twice."""

    blocks: list[Prefix] = field(default_factory=list)

    def count(self, tokens: Sequence[int], salt: str) -> int:
        end = 0
        while end + BLOCK < len(tokens) and (salt, tuple(tokens[: end + BLOCK])) in self.blocks:
            end += BLOCK
        return end

    def compute(self, tokens: Sequence[int], salt: str, *, found: int) -> list[Change]:
        ends = range(found + BLOCK, len(tokens) + 1, BLOCK)
        stored = [(salt, tuple(tokens[:end])) for end in ends]
        if not stored:
            return []
        self.blocks += stored
        return [
            Stored(
                hashes=[name_of(prefix) for prefix in stored],
                parent=name_of((salt, tuple(tokens[:found]))) if found else None,
                token_ids=list(tokens[found : ends[-1]]),
                block_size=BLOCK,
                extra_keys=[[salt] if salt and end == BLOCK else None for end in ends],
            )
        ]

    def evict(self, index: int) -> list[Change]:
        if not self.blocks:
            return []
        return [Removed([name_of(self.blocks.pop(index % len(self.blocks)))])]

    def clear(self) -> list[Change]:
        self.blocks.clear()
        return [Cleared()]


def name_of(prefix: Prefix) -> bytes:
    return repr(prefix).encode()


PROMPTS = st.lists(st.integers(0, 1), max_size=9)
SALTS = st.sampled_from(["", "a", "b"])
STEPS = st.one_of(
    st.tuples(st.just("compute"), PROMPTS, SALTS),
    st.tuples(st.just("side by side"), PROMPTS, SALTS),
    st.tuples(st.just("evict"), st.integers(0, 30), st.none()),
    st.tuples(st.just("clear"), st.none(), st.none()),
)


def play(engine: NaiveEngine, step: tuple[str, object, object]) -> list[Change]:
    match step:
        case ("compute", list() as tokens, str() as salt):
            return engine.compute(tokens, salt, found=engine.count(tokens, salt))
        case ("side by side", list() as tokens, str() as salt):
            return engine.compute(tokens, salt, found=0)
        case ("evict", int() as index, _):
            return engine.evict(index)
        case _:
            return engine.clear()


@settings(deadline=None)
@given(st.lists(STEPS, max_size=25), st.lists(st.tuples(PROMPTS, SALTS), min_size=1, max_size=5))
def test_it_counts_what_the_engine_would_find(
    steps: list[tuple[str, object, object]], asked: list[tuple[list[int], str]]
) -> None:
    engine, cached = NaiveEngine(), Cached()
    for sequence, step in enumerate(steps):
        assert cached.apply(sequence, play(engine, step))
        for tokens, salt in asked:
            assert cached.count(tokens, salt) == engine.count(tokens, salt)


@settings(deadline=None)
@given(st.lists(st.tuples(STEPS, st.booleans()), max_size=25), st.lists(st.tuples(PROMPTS, SALTS), min_size=1))
def test_after_a_gap_it_never_counts_more_than_there_is(
    steps: list[tuple[tuple[str, object, object], bool]], asked: list[tuple[list[int], str]]
) -> None:
    engine, cached = NaiveEngine(), Cached()
    expected = 0
    for sequence, (step, lost) in enumerate(steps):
        changes = play(engine, step)
        if lost:
            continue
        assert cached.apply(sequence, changes) == (sequence == expected)
        expected = sequence + 1
        for tokens, salt in asked:
            assert cached.count(tokens, salt) <= engine.count(tokens, salt)


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPTS, SALTS), max_size=30))
def test_it_never_keeps_more_blocks_than_it_may(prompts: list[tuple[list[int], str]]) -> None:
    engine, cached = NaiveEngine(), Cached(most_blocks=3)
    for sequence, (tokens, salt) in enumerate(prompts):
        cached.apply(sequence, engine.compute(tokens, salt, found=0))
        assert len(cached) <= 3
        assert cached.count(tokens, salt) <= engine.count(tokens, salt)


PROMPT = [5, 6, 7, 8, 9]


def stored(**changed: Any) -> Stored:
    fields: dict[str, Any] = {"hashes": [b"1", b"2"], "parent": None, "token_ids": PROMPT[:4], "block_size": 2}
    return Stored(**{**fields, **changed})


UNUSABLE = {
    "an-image": stored(extra_keys=[[["image", 0]], None]),
    "a-salt-after-the-first-block": stored(parent=b"0"),
    "another-medium": stored(medium="CPU"),
    "an-adapter": stored(adapter="poet", extra_keys=[["poet"], ["poet"]]),
    "a-salt-and-an-image": stored(extra_keys=[["salt", ["image", 0]], None]),
    "too-few-tokens": stored(token_ids=PROMPT[:3]),
    "no-blocks": stored(hashes=[], token_ids=[]),
}


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE)
def test_blocks_of_another_kind_are_never_found(change: Stored) -> None:
    cached = Cached()
    cached.apply(0, [change])
    assert [cached.count(PROMPT, salt) for salt in ("", "salt", "poet")] == [0, 0, 0]


@pytest.mark.parametrize("other", [{"group": 1}, {"kind": "sliding_window"}, {"kind": "mamba"}], ids=repr)
def test_an_engine_that_does_not_cache_prefixes_as_such_is_not_counted_on(other: dict[str, object]) -> None:
    cached = Cached()
    cached.apply(0, [stored(kind="full_attention")])
    assert cached.count(PROMPT) == 4
    cached.apply(1, [stored(hashes=[b"3", b"4"], **other)])
    assert not cached.countable
    assert cached.count(PROMPT) == 0


def test_evictions_in_another_group_or_medium_change_nothing() -> None:
    cached = Cached()
    cached.apply(0, [stored(), Removed([b"1"], medium="CPU"), Removed([b"1"], group=1)])
    assert cached.count(PROMPT) == 4


def test_numbers_may_stand_for_hashes() -> None:
    cached = Cached()
    cached.apply(0, [stored(hashes=[2**64 - 1, 7])])
    assert cached.count(PROMPT) == 4
    cached.apply(1, [Removed([7])])
    assert cached.count(PROMPT) == 2


def test_a_restarted_engine_begins_anew() -> None:
    cached = Cached()
    cached.apply(0, [stored()])
    cached.apply(1, [])
    assert not cached.apply(0, [stored(block_size=4, hashes=[b"x"])])
    assert (cached.block_size, len(cached), cached.count(PROMPT)) == (4, 1, 4)


def test_a_prompt_that_is_cached_whole_leaves_its_last_block_to_be_computed() -> None:
    cached = Cached()
    cached.apply(0, [stored()])
    assert cached.count(PROMPT[:4]) == 2
