"""A router's faces without the router behind them: turns are parsed, and answered at once."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from backhaul_common.clock import SystemClock
from backhaul_router.admission import Admission
from backhaul_router.conversations import Conversations, Ending
from backhaul_router.core.body import parse_body
from backhaul_router.core.claims import Released
from backhaul_router.core.errors import ApiError
from backhaul_router.core.expectation import Expectation
from backhaul_router.core.lookup import checked_session_id, keys_of
from backhaul_router.core.passing import parse_passed
from backhaul_router.core.queueing import TurnQueue
from backhaul_router.core.response_ids import keeper_of
from backhaul_router.core.responses import not_kept
from backhaul_router.core.turn import Outcome
from backhaul_router.explaining import TurnExplanation
from backhaul_router.http_protocol import ClientLimits
from backhaul_router.models import Models
from backhaul_router.passing import PassedAnswer, Passing
from backhaul_router.ports import Answer, TurnRequest
from backhaul_router.readiness import Readiness
from backhaul_router.turns import Turns
from tests.unit.router.test_nodes import node

NODE = node("d1", engine_url="http://10.0.0.1:8200")

LIMITS = ClientLimits(body_bytes=64 * 1024, receive_s=5.0, send_s=5.0, connections=10, goodbyes=10)


EXPECTATION = Expectation(
    node_id=NODE.node_id,
    engine_id=NODE.engines[0].engine_id,
    endpoint=NODE.endpoint,
    route="cold",
    stream=True,
    handed_off=True,
    token_count=9,
    share=1.0,
    before_s=0.1,
    estimate_s=0.5,
)


class _Stream:
    status = 200
    headers: Mapping[str, str] = {"content-type": "text/event-stream"}
    complete = True

    async def chunks(self) -> AsyncGenerator[bytes]:
        yield b"data: {}\n\n"
        yield b"data: [DONE]\n\n"

    async def read(self) -> bytes:
        return b""


class _Turns:
    def authenticate(self, authorization: str | None) -> str:
        return ""

    def engine_headers(self, authorization: str | None) -> dict[str, str]:
        return {} if authorization is None else {"authorization": authorization}

    @asynccontextmanager
    async def run(self, turn: TurnRequest) -> AsyncIterator[Answer]:
        streamed = _parsed(turn)
        outcome = Outcome()
        headers = {"content-type": "application/json", **outcome.headers}
        yield Answer(200, headers, outcome, None if streamed else b"{}", _Stream() if streamed else None)

    @asynccontextmanager
    async def forward(self, turn: TurnRequest) -> AsyncIterator[Any]:
        _parsed(turn)
        yield _Forwarded()

    async def explain(self, turn: TurnRequest) -> TurnExplanation:
        _parsed(turn)
        return TurnExplanation()


class _Leg:
    headers: Mapping[str, str] = {"x-request-id": "ours"}
    body = b'{"model":"m"}'
    expectation = EXPECTATION


class _Forwarded:
    """A turn whose decode leg goes to 10.0.0.1:8200."""

    endpoint = "10.0.0.1:8200"
    url = "http://10.0.0.1:8200/v1/chat/completions"
    served = Outcome()
    asks_for_stream = True
    names_hosts = False
    streams_hosts = False
    seen = False
    leg = _Leg()

    def told(self, step: str) -> None: ...

    def taken(self) -> None: ...

    def left(self) -> None: ...

    def ended(self) -> None: ...

    def broken(self) -> None: ...

    def given_up(self) -> None: ...

    def began(self, first_s: float) -> None:
        assert 0 <= first_s < math.inf, first_s

    def answered(self, status: int, failure: object, *, served: str, streams: bool, whole: bool) -> Mapping[str, str]:
        self.seen = not whole
        return Outcome().headers

    def whole(self, body: bytes) -> bytes:
        self.seen = True
        return body


def _parsed(turn: TurnRequest) -> bool:
    body = parse_body(turn.endpoint, turn.body)
    keys_of(body, checked_session_id(turn.session_id))
    return body.stream


class _Conversations:
    async def end(self, ending: Ending) -> Released:
        if checked_session_id(ending.session_id) is None:
            raise ApiError(400, "which one?")
        return Released(1, 0)


class _Models:
    async def document(self, headers: Mapping[str, str]) -> bytes:
        return b'{"data":[]}'


class _Passing:
    """Its engine answers everything; `NODE` keeps the responses."""

    async def ask(self, path: str, data: bytes, *, tenant: str, headers: Mapping[str, str]) -> PassedAnswer:
        return PassedAnswer(200, {}, parse_passed(path, data).for_engine("salt"))

    async def response(self, response_id: str, *, tenant: str, headers: Mapping[str, str]) -> PassedAnswer:
        if keeper_of(response_id, tenant, [NODE]) is None:
            raise not_kept()
        return PassedAnswer(200, {}, b"{}")


class _Readiness:
    def problem(self) -> str:
        return ""


def parts() -> dict[str, Any]:
    """Returns what all faces are made of."""
    admission = Admission(
        turns=TurnQueue(max_turns=100, max_queued=0, limits={}),
        queue_timeout_s=1.0,
        max_held_bytes=1024 * 1024,
        clock=SystemClock(),
    )
    return {
        "turns": cast(Turns, _Turns()),
        "conversations": cast(Conversations, _Conversations()),
        "models": cast(Models, _Models()),
        "admission": admission,
    }


def http_parts() -> dict[str, Any]:
    """Returns those, and what only HTTP has."""
    return {**parts(), "passing": cast(Passing, _Passing()), "readiness": cast(Readiness, _Readiness())}
