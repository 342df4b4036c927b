"""Scope and lookup keys."""

from typing import Any

import pytest

from backhaul_router.core.errors import ApiError
from backhaul_router.core.lookup import MAX_KEYS, MAX_SESSION_ID_BYTES, checked_session_id, keys_of, scope_of
from tests.unit.router.bodies import chat, completion


def test_the_next_turn_looks_where_this_one_is_labelled() -> None:
    first, second = chat("a"), chat("a", "b", "c")
    assert keys_of(second, None).find[0] == keys_of(first, None).own


def test_the_longest_prefix_comes_first() -> None:
    third = keys_of(chat("a", "b", "c", "d", "e"), None)
    assert third.find == (keys_of(chat("a", "b", "c"), None).own, keys_of(chat("a"), None).own)
    assert third.continues


def test_a_first_turn_has_nothing_to_look_up() -> None:
    keys = keys_of(chat("a"), None)
    assert (keys.find, keys.continues) == ((), False)
    assert len(keys.label) == 1


def test_a_session_id_is_tried_before_the_chain() -> None:
    keys = keys_of(chat("a", "b", "c"), b"s1")
    assert keys.find[0] == keys.label[0]
    assert len(keys.find) == len(keys.label) == 2
    assert keys.find[0] != keys_of(chat("a", "b", "c"), b"s2").find[0]


def test_a_completion_has_keys_only_with_a_session() -> None:
    assert keys_of(completion(), None).label == ()
    keys = keys_of(completion(), b"s1")
    assert keys.find == keys.label == keys_of(chat(), b"s1").find


def test_all_keys_are_single_turns_but_a_chat_s_session() -> None:
    keys = keys_of(chat("a", "b", "c", "d", "e"), b"s1")
    assert keys.turns == keys.find[1:] == keys_of(chat("a", "b", "c", "d", "e"), None).turns
    assert keys_of(chat("a"), b"s1").turns == ()
    assert keys_of(completion(), b"s1").turns == keys_of(completion(), b"s1").find
    assert keys_of(completion(), None).turns == ()


def test_the_body_can_carry_the_session() -> None:
    assert keys_of(completion(conversation_id="s1"), None) == keys_of(completion(), b"s1")
    assert keys_of(completion(conversation_id="s1"), b"s2") == keys_of(completion(), b"s2")
    assert keys_of(completion(conversation_id={"id": 1}), None).label == ()
    assert keys_of(completion(session_id="s1"), None) == keys_of(completion(), b"s1")
    assert keys_of(completion(session_id="s1", conversation_id="s2"), None) == keys_of(completion(), b"s2")
    assert keys_of(completion(session_id="s1", conversation_id=""), None) == keys_of(completion(), b"s1")
    assert keys_of(completion(session_id=""), None).label == ()
    with pytest.raises(ApiError, match="longer"):
        keys_of(completion(session_id="s" * 513), None)


def test_a_lookup_is_bounded() -> None:
    keys = keys_of(chat(*map(str, range(81))), b"s1")
    assert len(keys.find) == MAX_KEYS
    assert keys.find[1] == keys_of(chat(*map(str, range(79))), None).own


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"title": "t", "text": "x"}]},
        {"add_generation_prompt": False},
        {"reasoning_effort": "low"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_another_rendering_has_other_keys(fields: dict[str, Any]) -> None:
    assert keys_of(chat("a", **fields), None).own != keys_of(chat("a"), None).own


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.5}, {"max_tokens": 3}, {"stream": True}, {"tool_choice": "auto"}, {"tools": None}],
    ids=lambda fields: next(iter(fields)),
)
def test_sampling_does_not_change_keys(fields: dict[str, Any]) -> None:
    assert keys_of(chat("a", **fields), None) == keys_of(chat("a"), None)


def test_order_of_fields_and_nulls_do_not_change_keys() -> None:
    one = chat(messages=[{"role": "user", "content": "a", "name": None}])
    other = chat(messages=[{"content": "a", "role": "user"}])
    assert keys_of(one, None) == keys_of(other, None)


def test_every_part_of_the_scope_counts() -> None:
    base = {"model": "m", "cache_salt": "s", "tenant": "t"}
    scopes = {scope_of(**{**base, **change}) for change in ({}, {"model": "x"}, {"cache_salt": "x"}, {"tenant": "x"})}
    assert len(scopes) == 4
    assert scope_of(model="ab", cache_salt="c", tenant="") != scope_of(model="a", cache_salt="bc", tenant="")


@pytest.mark.parametrize("session_id", ["../../x", "a/b\n", "\udcff", "ü" * 100, b"\x00\xff"])
def test_any_bytes_make_a_session_key_of_plain_hex(session_id: str | bytes) -> None:
    (key,) = keys_of(completion(), checked_session_id(session_id)).label
    assert len(key) == 32
    assert set(key) <= set("0123456789abcdef")


def test_an_empty_session_id_is_none_and_a_long_one_is_refused() -> None:
    assert checked_session_id("") is None
    assert checked_session_id(None) is None
    with pytest.raises(ApiError):
        checked_session_id("x" * (MAX_SESSION_ID_BYTES + 1))
