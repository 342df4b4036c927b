"""What is refused before any engine is asked."""

import pytest

from backhaul_router.core.body import Endpoint, parse_body
from backhaul_router.core.errors import ApiError
from backhaul_router.core.lookup import keys_of
from backhaul_router.core.shape import MAX_DEPTH, MAX_NESTED
from tests.unit.router.bodies import chat, completion


@pytest.mark.parametrize(
    ("data", "param"),
    [
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"{", None, id="cut off"),
        pytest.param(b"[1]", None, id="an array"),
        pytest.param(b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', None, id="not UTF-8"),
        pytest.param(b"[" * 100_000, None, id="nested too deep"),
        pytest.param(b'{"model": "m", "x": ' + b"[" * 100 + b"]" * 100 + b"}", None, id="deeper than the limit"),
        pytest.param(b'{"model": "m", "x": ' + b"[" * 950 + b"]" * 950 + b"}", None, id="too deep to write again"),
        pytest.param(b'{"model": "m", "x": [' + b"{}," * 50_000 + b"1]}", None, id="too many objects"),
        pytest.param(b'{"messages": [{"role": "user"}]}', "model", id="no model"),
        pytest.param(b'{"model": 3, "messages": [{"role": "user"}]}', "model", id="model is a number"),
        pytest.param(b'{"model": "m", "messages": [{"role": "user"}], "session_id": 7}', "session_id", id="session"),
        pytest.param(b'{"model": "m"}', "messages", id="no messages"),
        pytest.param(b'{"model": "m", "messages": []}', "messages", id="messages empty"),
        pytest.param(b'{"model": "m", "messages": "hi"}', "messages", id="messages is a string"),
        pytest.param(b'{"model": "m", "messages": ["hi"]}', "messages[0]", id="message is a string"),
        pytest.param(b'{"model": "m", "messages": [{"content": "hi"}]}', "messages[0]", id="message without role"),
        pytest.param(b'{"model": "m", "messages": [{"role": "user", "content": 1}]}', "messages[0]", id="content"),
        pytest.param(b'{"model": "m", "messages": [{"role": "u"}], "stream": "yes"}', "stream", id="stream"),
        pytest.param(b'{"model": "m", "messages": [{"role": "u"}], "n": true}', "n", id="n is a boolean"),
        pytest.param(b'{"model": "m", "messages": [{"role": "u"}], "max_tokens": "9"}', "max_tokens", id="max_tokens"),
        pytest.param(
            b'{"model": "m", "messages": [{"role": "u"}], "stream_options": {"include_usage": true}}',
            "stream_options",
            id="stream options without stream",
        ),
    ],
)
def test_a_bad_chat_body_is_a_400_that_names_the_field(data: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(Endpoint.CHAT, data)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_as_deep_and_as_manifold_as_the_limits_is_accepted() -> None:
    deep, many = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1), b"{}," * (MAX_NESTED - 10)
    for value in (deep, b"[" + many + b"1]", b'"' + b"[{" * MAX_NESTED + b'"'):
        keys_of(
            parse_body(Endpoint.CHAT, b'{"model":"m","messages":[{"role":"user"}],"tools":[],"x":' + value + b"}"), None
        )


@pytest.mark.parametrize("prompt", [b'""', b"[]", b"7", b"null"])
def test_a_completion_needs_a_prompt(prompt: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(Endpoint.COMPLETIONS, b'{"model": "m", "prompt": ' + prompt + b"}")
    assert caught.value.param == "prompt"


def test_values_keep_the_bytes_that_came() -> None:
    body = parse_body(Endpoint.CHAT, b'{"model":"m","seed":12345678901234567890123,"messages":[ {"role" :"user"} ]}')
    assert bytes(body.raw["seed"]) == b"12345678901234567890123"
    assert bytes(body.raw["messages"]) == b'[ {"role" :"user"} ]'


def test_what_the_router_reads_of_a_body() -> None:
    assert chat(stream=True, cache_salt="s").stream is True
    assert chat(stream=None).stream is False
    assert chat(cache_salt="s").cache_salt == "s"
    assert completion(cache_salt=None).cache_salt == ""
