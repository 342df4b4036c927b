"""The tokenizer: what is generated comes back as the same tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_simulator.model import FIRST_WORD
from backhaul_simulator.tokens import EOS, MediaError, decode, encode, encode_chat


@given(st.lists(st.integers(FIRST_WORD, 49_999)))
def test_an_answers_text_is_made_of_the_same_tokens_again(tokens: list[int]) -> None:
    assert encode("".join(map(decode, tokens))) == tokens


@given(st.text())
def test_any_text_has_tokens_that_the_model_knows(text: str) -> None:
    assert all(FIRST_WORD <= token < 100 for token in encode(text, vocabulary=100))


def test_special_tokens_have_no_text_and_no_text_is_one() -> None:
    assert decode(EOS) == ""
    assert encode("t2") != [EOS]


def test_a_history_begins_with_the_prompt_and_the_answer_of_the_turn_before() -> None:
    opening = [{"role": "user", "content": "hello there"}]
    answer = [500, 600, EOS]
    text = "".join(map(decode, answer))
    later = [*opening, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]

    prompt = encode_chat(opening)

    assert encode_chat(later)[: len(prompt) + len(answer)] == [*prompt, *answer]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"tools": [{"function": {"name": "f"}}]}, id="tools"),
        pytest.param({"extras": {"enable_thinking": True}}, id="template arguments"),
        pytest.param({"add_generation_prompt": False}, id="no generation prompt"),
        pytest.param({"continue_final_message": True}, id="a last message that goes on"),
        pytest.param({"messages": [{"role": "system", "content": "hi"}]}, id="role"),
        pytest.param({"messages": [{"role": "user", "content": "hi", "name": "x"}]}, id="name"),
    ],
)
def test_whatever_shapes_a_prompt_changes_its_tokens(change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    assert encode_chat(**{**plain, **change}) != encode_chat(**plain)


def test_content_in_parts_is_the_text_of_its_parts() -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    assert encode_chat([{"role": "user", "content": parts}]) == encode_chat(
        [{"role": "user", "content": "hello there"}]
    )


def test_an_image_is_refused() -> None:
    with pytest.raises(MediaError, match="At most 0 image"):
        encode_chat([{"role": "user", "content": [{"type": "image_url"}]}])
