"""Whether an answer begins well."""

import json
from typing import Any

import pytest

from backhaul_router.core.opening import MAX_OPENING_BYTES, Opening, failed_whole, opening_of


def event(document: Any, end: str = "\n\n") -> bytes:
    return f"data: {json.dumps(document)}{end}".encode()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


ROLE = event(delta(role="assistant", content=""))
FAILED = event({"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}})
REFUSED = event({"error": {"message": "too long", "type": "BadRequestError", "code": 400}})


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        pytest.param(b"", Opening.UNDECIDED, id="nothing"),
        pytest.param(ROLE, Opening.UNDECIDED, id="who speaks"),
        pytest.param(ROLE + b"data: {", Opening.UNDECIDED, id="who speaks and half an event"),
        pytest.param(event(delta(role="assistant", reasoning_content=None)), Opening.UNDECIDED, id="nulls"),
        pytest.param(b": ping\n\n" + ROLE, Opening.UNDECIDED, id="a comment"),
        pytest.param(ROLE + FAILED, Opening.FAILED, id="who speaks, then failed"),
        pytest.param(FAILED, Opening.FAILED, id="failed at once"),
        pytest.param(event({"error": "no"}), Opening.FAILED, id="an error without a code"),
        pytest.param(event({"error": {}}, "\r\n\r\n"), Opening.FAILED, id="CRLF"),
        pytest.param(b'data:{"choices":[{"text":"","finish_reason":"error"}]}\n', Opening.FAILED, id="finish_reason"),
        pytest.param(ROLE + REFUSED, Opening.ANSWER, id="the client's own fault"),
        pytest.param(event(delta(content="Hi")), Opening.ANSWER, id="content"),
        pytest.param(event(delta(tool_calls=[{"index": 0}])), Opening.ANSWER, id="tools"),
        pytest.param(event(delta(reasoning_content="hm")), Opening.ANSWER, id="reasoning"),
        pytest.param(event({"choices": [{"text": ""}]}), Opening.ANSWER, id="a token without text"),
        pytest.param(
            event({"choices": [{"delta": {}, "finish_reason": "stop"}]}), Opening.ANSWER, id="an empty answer"
        ),
        pytest.param(event({"choices": [], "usage": {}}), Opening.ANSWER, id="usage"),
        pytest.param(b"data: [DONE]\n\n", Opening.ANSWER, id="done"),
        pytest.param(ROLE + event(delta(content="Hi")) + FAILED, Opening.ANSWER, id="failed after content"),
        pytest.param(b"data: " + b"x" * MAX_OPENING_BYTES, Opening.ANSWER, id="much"),
    ],
)
def test_what_an_opening_shows(stream: bytes, shown: Opening) -> None:
    assert opening_of(stream) is shown


@pytest.mark.parametrize(
    ("body", "failed"),
    [
        (b'{"choices": [{"message": {"content": ""}, "finish_reason": "error"}]}', True),
        (b'{"choices": [{"text": "", "finish_reason": "error"}]}', True),
        (b'{"error": {"message": "no", "code": 500}}', True),
        (b'{"choices": [{"text": "\\"error\\"", "finish_reason": "stop"}]}', False),
        (b'{"choices": [{"text": "error", "finish_reason": "stop"}]}', False),
        (b'"error" but no JSON', False),
    ],
)
def test_a_whole_answer_says_that_it_failed(body: bytes, failed: bool) -> None:
    assert failed_whole(body) is failed
