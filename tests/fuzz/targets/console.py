"""What operators send to a router's console, and the file with their keys."""

import asyncio

from backhaul_router.console.service import _question
from backhaul_router.core.console.operators import parse_operators
from backhaul_router.core.errors import ApiError
from tests.fakes.clock import FakeClock
from tests.fakes.console import FakeConsole, node
from tests.fuzz.inputs import DEEP, json_of, samples_of
from tests.fuzz.target import Target

_READER = FakeConsole(node("d1"), clock=FakeClock()).reader
_KEYS = b'key_sha256 = ["%s", "%s"]\n' % (b"a" * 64, b"0" * 64)


def _conversation(data: bytes) -> bool:
    try:
        asyncio.run(_READER.by_id(_question(data)))
    except ApiError as error:
        if error.status != 400:
            raise
        return False
    return True


def _operators(data: bytes) -> bool:
    try:
        operators = parse_operators(data.decode())
    except ValueError:
        return False
    assert operators.digests
    return True


TARGETS = (
    Target(
        "questions about conversations",
        ("backhaul_router.console.service:_question",),
        json_of({"id": "session-1"}, {"id": "é", "model": "m", "tenant": "t", "cache_salt": "s"}),
        _conversation,
    ),
    Target(
        "files of operators' keys",
        ("backhaul_router.core.console.operators:parse_operators",),
        samples_of(_KEYS, *(b"key_sha256 = %s%s\n" % (b"[" * depth, b"]" * depth) for depth in DEEP)),
        _operators,
    ),
)
