"""Answers of `/v1/responses` and `/v1/messages`: how they begin and end, what of them is taken out, what they count."""

import json
from typing import Any

import pytest

from backhaul_router.core.body import Endpoint
from backhaul_router.core.clean_lines import CleanLines, without_params
from backhaul_router.core.errors import ApiError
from backhaul_router.core.legs import hand_off
from backhaul_router.core.opening import Opening, failed_whole, opening_of
from backhaul_router.core.sse import MAX_LINE_BYTES, MAX_RESPONSE_LINE_BYTES
from backhaul_router.core.usage import PromptUsage, UsageLines, with_prompt
from tests.fakes.other_forms import message_events, named, response_events, whole_message, whole_response

BODY = {"model": "tiny"}
DECODE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 99},
}
PREFILL = PromptUsage(100, b'{"cached_tokens":16}')
RESPONSE, MESSAGE = (response_events(BODY, ["a", "b"], DECODE), message_events(BODY, ["a", "b"], DECODE))
LONG = response_events({"model": "tiny", "instructions": "w" * 250_000}, ["a"], DECODE)
HANDLE = {"remote_host": "10.0.0.9"}
STREAMS = [
    pytest.param(Endpoint.RESPONSES, RESPONSE, id="response"),
    pytest.param(Endpoint.MESSAGES, MESSAGE, id="message"),
]


def data_of(event: bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(event.split(b"data: ", 1)[1])
    return document


# How they begin


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        pytest.param(RESPONSE[0], Opening.ACCEPTED, id="taken"),
        pytest.param(b"".join(RESPONSE[:2]), Opening.ACCEPTED, id="in progress"),
        pytest.param(b"".join(RESPONSE[:3]), Opening.ANSWER, id="an item of a response"),
        pytest.param(b"".join(RESPONSE), Opening.ANSWER, id="all of a response"),
        pytest.param(LONG[0][:200_000], Opening.ACCEPTED, id="part of what was asked"),
        pytest.param(b"".join(LONG[:2]), Opening.ACCEPTED, id="what was asked, twice"),
        pytest.param(b"".join(LONG[:2]) * 4, Opening.ANSWER, id="too much to hold back"),
        pytest.param(MESSAGE[0], Opening.UNDECIDED, id="who speaks"),
        pytest.param(b"".join(MESSAGE[:2]), Opening.ANSWER, id="a block of a message"),
        pytest.param(
            MESSAGE[0] + named({"type": "error", "error": {"type": "internal_error", "message": "no"}}),
            Opening.FAILED,
            id="who speaks, then failed",
        ),
    ],
)
def test_what_the_first_bytes_of_a_stream_show(stream: bytes, shown: Opening) -> None:
    assert opening_of(stream) is shown


def test_a_whole_answer_that_speaks_of_errors_has_not_failed() -> None:
    for document in (whole_response(BODY, '"error": 1', DECODE), whole_message(BODY, '"error": 1', DECODE)):
        assert not failed_whole(json.dumps({**document, "error": None}).encode())


# How they end


@pytest.mark.parametrize(("endpoint", "events"), STREAMS)
def test_a_stream_has_ended_after_its_last_event_and_not_before(endpoint: Endpoint, events: list[bytes]) -> None:
    lines = CleanLines(endpoint)
    for event in events[:-1]:
        lines.feed(event)
        assert not lines.done
    lines.feed(events[-1][:-1])
    assert not lines.done
    lines.feed(events[-1][-1:])
    assert lines.done


@pytest.mark.parametrize(("endpoint", "events"), STREAMS)
def test_an_error_is_an_end_too(endpoint: Endpoint, events: list[bytes]) -> None:
    lines = CleanLines(endpoint)
    lines.feed(events[0] + named({"type": "error", "error": {}}))
    assert lines.done


@pytest.mark.parametrize(("endpoint", "events"), STREAMS)
def test_what_an_answer_says_does_not_end_it(endpoint: Endpoint, events: list[bytes]) -> None:
    lines = CleanLines(endpoint)
    lines.feed(events[0] + b"data: " + b"x" * (MAX_RESPONSE_LINE_BYTES + 1))
    lines.feed(b"event: error" + b"x" * (MAX_RESPONSE_LINE_BYTES + 1))
    lines.feed(b"\n\ndata: [DONE]\n\n")
    lines.rest()
    assert not lines.done


# What is taken out


@pytest.mark.parametrize("handle", [None, HANDLE])
def test_no_event_of_a_response_carries_a_handle(handle: Any) -> None:
    long = "w" * (MAX_LINE_BYTES + 10)
    document = {**whole_response(BODY, long, DECODE), "kv_transfer_params": handle}
    event = named({"type": "response.completed", "response": document})
    lines = CleanLines(Endpoint.RESPONSES)
    passed = b"".join(lines.feed(event[start : start + 1000]) for start in range(0, len(event), 1000))
    assert b"kv_transfer_params" not in passed
    del document["kv_transfer_params"]
    assert data_of(passed)["response"] == document


def test_a_handle_in_an_event_that_is_too_long_is_not_passed_on() -> None:
    long = "w" * (MAX_RESPONSE_LINE_BYTES + 200_000)
    for handle, fails in ((None, False), (HANDLE, True)):
        document = {**whole_response(BODY, long, DECODE), "kv_transfer_params": handle}
        lines = CleanLines(Endpoint.RESPONSES)
        event = named({"type": "response.completed", "response": document})
        pieces = [event[start : start + 100_000] for start in range(0, len(event), 100_000)]
        if fails:
            with pytest.raises(ValueError, match="cannot be taken out"):
                [*map(lines.feed, pieces)]
        else:
            assert b"".join(map(lines.feed, pieces)) == event


def test_a_whole_response_keeps_every_other_byte() -> None:
    assert without_params(b'{"id":1.10,"kv_transfer_params":null,"response":{"a": [ ]}}') == (
        b'{"id":1.10,"response":{"a": [ ]}}'
    )


# What they count


def test_a_response_counts_the_prompt_as_prefill_did() -> None:
    document = whole_response(BODY, "x", DECODE)
    document["usage"]["input_tokens_details"]["cached_tokens_per_turn"] = [99]
    usage = json.loads(with_prompt(json.dumps(document).encode(), PREFILL))["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (100, 7, 107)
    details = usage["input_tokens_details"]
    assert (details["cached_tokens"], details["cached_tokens_per_turn"], details["cache_write_tokens"]) == (16, [16], 0)


def test_a_message_counts_the_prompt_as_prefill_did() -> None:
    usage = json.loads(with_prompt(json.dumps(whole_message(BODY, "x", DECODE)).encode(), PREFILL))["usage"]
    assert usage == {"input_tokens": 84, "output_tokens": 7, "cache_read_input_tokens": 16}


@pytest.mark.parametrize(("endpoint", "events"), STREAMS)
def test_a_stream_counts_as_the_whole_answer_does(endpoint: Endpoint, events: list[bytes]) -> None:
    lines = UsageLines(PREFILL, MAX_RESPONSE_LINE_BYTES)
    passed = b"".join(map(lines.feed, events)).split(b"\n\n")
    last = [data_of(event) for event in passed if b"usage" in event][-1]
    whole = whole_response if endpoint is Endpoint.RESPONSES else whole_message
    told = json.loads(with_prompt(json.dumps(whole(BODY, "ab", DECODE)).encode(), PREFILL))["usage"]
    assert (last.get("response") or last)["usage"] == told


@pytest.mark.parametrize("whole", [whole_response, whole_message])
def test_what_prefill_does_not_know_leaves_the_count_as_it_is(whole: Any) -> None:
    document = json.dumps(whole(BODY, "x", DECODE)).encode()
    assert with_prompt(document, PromptUsage(100, b"null")) is document


@pytest.mark.parametrize("whole", [whole_response, whole_message])
def test_a_prefill_reply_tells_what_it_counted(whole: Any) -> None:
    hand = hand_off(json.dumps(whole(BODY, "x", DECODE)).encode())
    assert hand.usage is not None
    assert (hand.usage.token_count, hand.usage.cached) == (100, 99)


def test_a_message_may_not_tell_of_cached_tokens() -> None:
    usage = {**DECODE, "prompt_tokens_details": None}
    hand = hand_off(json.dumps(whole_message(BODY, "x", usage)).encode())
    assert hand.usage == PromptUsage(100, b"null")


# Errors


def test_an_error_is_in_the_form_of_who_asked() -> None:
    error = ApiError(503, "why")
    assert json.loads(error.body_at("/v1/messages")) == {"type": "error", **json.loads(error.body)}
    assert error.body_at("/v1/responses") == error.body_at("/v1/chat/completions") == error.body
    message, response = data_of(error.event_at("/v1/messages")), data_of(error.event_at("/v1/responses"))
    assert message["error"]["message"] == response["error"]["message"] == response["message"] == "why"
    assert message["type"] == response["type"] == "error"
    assert all(error.event_at(path).startswith(b"event: error\n") for path in ("/v1/messages", "/v1/responses"))
