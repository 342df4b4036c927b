"""Which requests need the decode engine alone."""

from typing import Any

import pytest

from backhaul_router.core.kinds import decode_alone, text_only, tokens_certain
from tests.unit.router.bodies import chat, completion


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 3}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"prompt_embeds": "AAAA", "prompt": None}, "prompt_embeds"),
    ],
)
def test_decode_serves_it_alone(fields: dict[str, Any], why: str) -> None:
    assert decode_alone(completion(**{"prompt": "a", **fields})) == why


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1, "best_of": 1, "use_beam_search": False, "echo": False},
        {"n": None, "prompt_logprobs": None, "prompt_embeds": None},
        {"prompt": [1, 2, 3]},
        {"truncate_prompt_tokens": 100},
        {"logprobs": 3},
    ],
)
def test_two_legs_serve_it(fields: dict[str, Any]) -> None:
    assert decode_alone(completion(**{"prompt": "a", **fields})) == ""


def test_chat_with_several_choices_is_served_alone() -> None:
    assert decode_alone(chat(n=2)) == "n"
    assert decode_alone(chat()) == ""


def test_only_text_is_known_by_its_tokens() -> None:
    assert text_only(chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]))
    assert not text_only(chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]))
    assert text_only(completion(messages=5))


@pytest.mark.parametrize(
    "fields", [{"truncate_prompt_tokens": 100}, {"suffix": ")"}, {"tools": [{}], "tool_choice": "none"}]
)
def test_a_tokenizer_does_not_know_all_that_shapes_a_prompt(fields: dict[str, Any]) -> None:
    assert tokens_certain(completion())
    assert not tokens_certain(completion(**fields))


def test_a_tokenizer_does_not_know_chats_that_have_no_template() -> None:
    assert not tokens_certain(chat(model="openai/GPT-OSS-20b"))
    assert tokens_certain(completion(model="openai/gpt-oss-20b"))
