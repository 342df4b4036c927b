"""What the Python client and the command line read: answers that engines wrote, and lines of logs."""

import itertools

from backhaul_cli.commands.trace import _trace_of
from backhaul_cli.services import document_in
from backhaul_client import EngineFailedError
from backhaul_client.answer import EventParser, object_in, text_of
from tests.fuzz.inputs import in_pieces, json_of, made_of, one_of, samples_of
from tests.fuzz.target import Target

_EVENT = {"choices": [{"index": 0, "delta": {"content": "hi"}}], "model": "m", "usage": None}
_EVENTS = json_of(_EVENT, {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]}, {"error": {"code": 500}})


def _event(data: bytes) -> bytes:
    return b"data: " + data.replace(b"\n", b" ") + b"\n\ndata: [DONE]\n\n"


def _says(pieces: tuple[bytes, ...]) -> bool:
    parser = EventParser()
    events = itertools.chain.from_iterable(map(parser.feed, pieces))
    try:
        said = [text_of(object_in(data)) for data in events if data != "[DONE]"]
    except EngineFailedError:
        return False
    return any(said)


def _whole(data: bytes) -> bool:
    return bool(document_in(data))


def _line(data: bytes) -> bool:
    return bool(_trace_of(data.decode(errors="replace")))


TARGETS = (
    Target(
        "answers for the Python client",
        ("backhaul_client.answer:object_in",),
        in_pieces(made_of(_EVENTS, _event)),
        _says,
    ),
    Target(
        "answers for the command line",
        ("backhaul_cli.services:document_in",),
        json_of({"status": "ready", "reason": ""}, {"count": 3, "tokens": [1, 2, 3]}),
        _whole,
    ),
    Target(
        "lines of logs",
        ("backhaul_cli.commands.trace:_trace_of",),
        one_of(json_of({"event": "turn", "trace_id": "a" * 32}), samples_of(b"event=turn trace_id='abc' x=1", b"x")),
        _line,
    ),
)
