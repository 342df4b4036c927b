"""Token counts for the client."""

import json
from typing import Any

import pytest

from backhaul_router.core.sse import MAX_LINE_BYTES
from backhaul_router.core.usage import PromptUsage, UsageLines, with_prompt

PREFILL = PromptUsage(100, b'{"cached_tokens":16}')
DECODE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 99},
}
RIGHT = {**DECODE, "prompt_tokens_details": {"cached_tokens": 16}}


def document(usage: Any, **fields: Any) -> bytes:
    return json.dumps({"id": "x", "choices": [], "usage": usage, **fields}).encode()


def line(usage: Any, end: bytes = b"\n\n") -> bytes:
    return b"data: " + document(usage) + end


def test_the_prompt_is_counted_by_prefill_and_the_answer_by_decode() -> None:
    got = json.loads(with_prompt(document(DECODE, z=1.5), PREFILL))
    assert got == {"id": "x", "choices": [], "usage": RIGHT, "z": 1.5}
    assert list(got["usage"]) == list(DECODE)


def test_where_the_engines_differ_the_total_is_the_sum_of_what_is_told() -> None:
    got = json.loads(with_prompt(document({**DECODE, "prompt_tokens": 98, "total_tokens": 105}), PREFILL))
    assert got["usage"] == RIGHT


def test_what_prefill_does_not_know_is_not_told() -> None:
    got = json.loads(with_prompt(document(DECODE), PromptUsage(100, b"null")))
    assert got["usage"]["prompt_tokens_details"] is None


@pytest.mark.parametrize(
    "untouched",
    [
        document(None),
        document({"prompt_tokens": 100, "completion_tokens": 7}),
        document({"prompt_tokens": 100, "prompt_tokens_details": None}),
        document({**DECODE, "completion_tokens": "many"}),
        b'{"text": "prompt_tokens_details"}',
        b'["prompt_tokens_details"]',
        b'{"prompt_tokens_details": ',
    ],
)
def test_everything_else_stays_as_it_came(untouched: bytes) -> None:
    assert with_prompt(untouched, PREFILL) is untouched


def fed(*pieces: bytes) -> bytes:
    lines = UsageLines(PREFILL)
    return b"".join(map(lines.feed, pieces)) + lines.rest()


STREAM = b'data: {"choices":[{"text":"a"}]}\n\n' + line(DECODE) + b"data: [DONE]\n\n"


def test_of_a_stream_only_the_event_with_cached_tokens_is_changed() -> None:
    before, event, after = fed(STREAM).partition(line(RIGHT).replace(b" ", b"").replace(b"data:", b"data: "))
    assert event
    assert (before, after) == (b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n")


def test_however_a_stream_is_cut_it_comes_out_the_same() -> None:
    whole = fed(STREAM)
    assert fed(*[bytes([byte]) for byte in STREAM]) == whole
    assert {fed(STREAM[:at], STREAM[at:]) for at in range(len(STREAM))} == {whole}


@pytest.mark.parametrize("end", [b"\n", b"\r\n\r\n", b"\r\r"])
def test_line_ends_stay(end: bytes) -> None:
    got = fed(line(DECODE, end))
    assert got.endswith(b"}" + end)
    assert b'"cached_tokens":16' in got


def test_a_complete_event_is_passed_on_at_once() -> None:
    lines = UsageLines(PREFILL)
    assert lines.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert lines.feed(b"data: 2") == b""
    assert lines.feed(b"\n\ndata: 3\n\n") == b"data: 2\n\ndata: 3\n\n"


def test_an_endless_line_is_not_held() -> None:
    lines = UsageLines(PREFILL)
    piece = b"x" * (MAX_LINE_BYTES + 1)
    assert lines.feed(piece) == piece
    assert lines.feed(b"y\n") == b"y\n"


def test_other_lines_that_speak_of_it_stay() -> None:
    stream = b": prompt_tokens_details\n" + b'data: {"choices":[{"text":"prompt_tokens_details"}]}\n\n'
    assert fed(stream) == stream
