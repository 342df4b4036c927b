"""Bytes on a router's HTTP port: head, body, and what comes after."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11

from backhaul_router.core.response_ids import response_id_of
from backhaul_router.http_protocol import ApiServer
from backhaul_router.http_service import HttpService
from tests.fuzz.inputs import in_pieces, samples_of
from tests.fuzz.routers import LIMITS, NODE, http_parts
from tests.fuzz.running import run
from tests.fuzz.target import Target

_ROUNDS = 60


class _Wire(asyncio.Transport):
    """A client that takes everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def write_eof(self) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default


async def _answers(pieces: tuple[bytes, ...]) -> bytes:
    service = HttpService(address="127.0.0.1:0", limits=LIMITS, **http_parts())
    server = ApiServer(service._handle, limits=LIMITS)
    connection, wire = server(), _Wire()
    connection.connection_made(wire)
    for piece in pieces:
        if not wire.closing:
            connection.data_received(piece)
        await asyncio.sleep(0)
    await _rounds(lambda: wire.closing)
    connection.eof_received()
    await _rounds(lambda: wire.closing or not service._running)
    assert wire.closing or not service._running, "a request that does not end"
    connection.connection_lost(None)
    await server.shutdown(1.0)
    return wire.sent


async def _rounds(over: Callable[[], bool]) -> None:
    """Lets everything go on that can."""
    for _ in range(_ROUNDS):
        if over():
            return
        await asyncio.sleep(0)


def _accepts(pieces: tuple[bytes, ...]) -> bool:
    statuses = _statuses(run(_answers(pieces)))
    assert not any(status >= 500 for status in statuses), statuses
    return 200 in statuses


def _statuses(sent: bytes) -> list[int]:
    """Reads the answers as a strict client does; one cut off by a client that has left may be incomplete."""
    if not sent:
        return []
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(sent)
    statuses: list[int] = []
    while True:
        event = client.next_event()
        if isinstance(event, h11.Response):
            statuses.append(event.status_code)
        if not isinstance(event, h11.InformationalResponse | h11.Response | h11.Data):
            return statuses


_RESPONSE = response_id_of(NODE, "", "0" * 32).encode()
_BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
_INPUT = b'{"model":"m","input":["hi"]}'
_MESSAGES = b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}'
_JSON = b" HTTP/1.1\r\nhost: x\r\nx-api-key: key\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"authorization: Bearer key\r\nx-session-id: s\r\n"
    b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
    b"x-envoy-expected-rq-timeout-ms: 5000\r\nx-backhaul-reuse: off\r\nx-request-id: mine\r\n"
)

TARGETS = (
    Target(
        "HTTP requests",
        (
            "backhaul_router.http_service:HttpService",
            "backhaul_router.http_protocol:ApiProtocol",
            "backhaul_router.request_headers:turn_request",
        ),
        in_pieces(
            samples_of(
                _POST + b"content-length: %d\r\n\r\n" % len(_BODY) + _BODY,
                _POST + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nx-last: y\r\n\r\n" % (len(_BODY), _BODY),
                _POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY,
                _POST + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b",
                b"DELETE /v1/conversations/a%20b%ff?model=m&cache_salt=%C3%A9 HTTP/1.1\r\nhost: x\r\n\r\n",
                b"POST /v1/embeddings" + _JSON % len(_INPUT) + _INPUT,
                b"POST /v1/messages" + _JSON % len(_MESSAGES) + _MESSAGES,
                b"GET /v1/responses/%s HTTP/1.1\r\nhost: x\r\n\r\n" % _RESPONSE,
                b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n",
                b"GET /ready HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
                b"GET http://x/health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            )
        ),
        _accepts,
    ),
)
