"""Cached pointers, and when an engine is not asked."""

from dataclasses import replace

import pytest

from backhaul_node_agent import convert
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.second_chance import (
    Backoff,
    CachedPointers,
    cached_pointer,
    enough,
    labelled_pointer,
)
from tests.fakes import block_sets

TOKENS = list(range(400))


def retained(set_id: str = "set-1", *, tokens: list[int] = TOKENS, keys: tuple[str, ...] = ("key",)) -> BlockSet:
    return replace(convert.block_set(block_sets.report(set_id, tokens=tokens)), keys=keys)


def pointer(set_id: str = "set-1", *, tokens: list[int] = TOKENS, keys: tuple[str, ...] = ("key",)) -> BlockSet:
    made = cached_pointer(retained(set_id, tokens=tokens, keys=keys))
    assert made is not None
    return made


def test_a_cached_pointer_says_what_was_there_and_holds_no_blocks() -> None:
    held = retained()
    made = pointer()
    assert (made.set_id, made.cached, made.params, list(made.all_block_ids)) == ("cached-set-1", True, {}, [])
    same = ("scope", "keys", "token_count", "identity", "stride", "anchors")
    assert [getattr(made, field) for field in same] == [getattr(held, field) for field in same]


def test_a_set_whose_name_is_too_long_leaves_no_pointer() -> None:
    assert cached_pointer(retained("x" * 249)) is not None
    assert cached_pointer(retained("x" * 250)) is None


def test_a_label_names_scope_and_keys() -> None:
    made = labelled_pointer("backhaul:scope:key-1:key-2:key-1")
    assert made is not None
    assert (made.scope, made.keys, made.cached, made.token_count) == ("scope", ("key-1", "key-2"), True, 0)
    again = labelled_pointer("backhaul:scope:key-1:key-2:key-1")
    assert again == made
    other = labelled_pointer("backhaul:scope:key-1:key-3")
    assert other is not None
    assert other.set_id != made.set_id


@pytest.mark.parametrize(
    "label",
    ["", "session-1", "backhaul", "backhaul:scope", "backhaul:scope:", "backhaul:sc ope:key", "backhaul:a:b:c:d:e:f"],
)
def test_what_is_no_label_of_ours_leaves_no_pointer(label: str) -> None:
    assert labelled_pointer(label) is None


def test_too_few_tokens_are_not_asked_for() -> None:
    assert [enough(count, 0) for count in (255, 256)] == [False, True]
    assert [enough(count, 2001) for count in (1000, 1001)] == [False, True]


def test_the_oldest_go_when_there_are_too_many() -> None:
    pointers = CachedPointers(most=2)
    assert pointers.add(pointer("a"), 1.0) == (True, [])
    assert pointers.add(pointer("b"), 2.0) == (True, [])
    # One that is added again is young again.
    assert pointers.add(pointer("a"), 3.0) == (False, [])
    assert pointers.add(pointer("c"), 4.0) == (True, [pointer("b")])
    assert [len(pointers), pointers.get("cached-b")] == [2, None]


def test_pointers_grow_old() -> None:
    pointers = CachedPointers()
    pointers.add(pointer("a"), 1.0)
    pointers.add(pointer("b"), 2.0)
    assert pointers.aged(1.0) == []
    assert pointers.aged(2.0) == [pointer("a")]
    assert pointers.aged(9.0) == [pointer("b")]
    assert len(pointers) == 0


def test_the_next_turn_of_a_conversation_supersedes_the_pointer() -> None:
    pointers = CachedPointers()
    pointers.add(pointer("a"), 1.0)
    longer = retained("b", tokens=[*TOKENS, *range(100)])
    assert pointers.superseded(replace(longer, scope="another")) == []
    assert pointers.superseded(replace(longer, keys=("another",))) == []
    assert pointers.superseded(replace(longer, keys=("another",), continues=("key",))) == [pointer("a")]
    pointers.add(pointer("a"), 1.0)
    assert pointers.superseded(longer) == [pointer("a")]
    assert pointers.superseded(longer) == []


def test_another_text_under_the_same_key_supersedes_nothing() -> None:
    pointers = CachedPointers()
    pointers.add(pointer("a"), 1.0)
    assert pointers.superseded(retained("title", tokens=list(range(7, 500)))) == []
    assert pointers.superseded(retained("shorter", tokens=TOKENS[:200])) == []


def test_a_pointer_without_proof_goes_when_all_its_keys_lead_elsewhere() -> None:
    pointers = CachedPointers()
    made = labelled_pointer("backhaul:scope:key-1:key-2")
    assert made is not None
    pointers.add(made, 1.0)
    assert pointers.superseded(retained(keys=("key-1",))) == []
    assert pointers.superseded(retained(keys=("key-1", "key-2", "key-3"))) == [made]


def test_wrong_guesses_are_paid_with_ever_longer_pauses() -> None:
    backoff, pauses, now = Backoff(), [], 0.0
    for _ in range(12):
        assert backoff.over(now)
        backoff.wrong(now)
        assert not backoff.over(now + 0.99 * (backoff.until - now))
        pauses.append(backoff.until - now)
        now = backoff.until
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    backoff.right()
    backoff.wrong(now)
    assert backoff.until == now + 1


def test_guesses_that_turn_out_wrong_together_cost_one_pause() -> None:
    backoff = Backoff()
    for number in range(8):
        backoff.wrong(number / 100)
    assert backoff.until == 1
    backoff.wrong(1.0)
    assert backoff.until == 3
