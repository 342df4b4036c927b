"""The face towards Envoy and its like: an endpoint picker that runs a turn up to its decode leg.

The gateway sends that leg and streams its answer to the client. Of the bytes of streams none comes through here.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog

from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul.envoy.v3 import ext_proc_pb2_grpc
from backhaul_common.addresses import join_address, split_address
from backhaul_router import ext_proc_messages as messages
from backhaul_router.admission import Admission, Held
from backhaul_router.core import gateway
from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.errors import ApiError
from backhaul_router.exchange import Exchange, GoneError
from backhaul_router.forwarding import Forwarded
from backhaul_router.grpc_requests import metadata_of
from backhaul_router.request_headers import (
    STREAM_HEADERS,
    TRACE_HEADERS,
    authorization_in,
    left_s,
    request_id_in,
    turn_request,
)
from backhaul_router.turns import Turns

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_NAMES = ("readiness",)
"""Names beside the service's by which endpoint pickers are asked for their health."""

_RESOLVE_S = 2.0
"""For finding the address of an engine whose node names a host."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Request:
    """An HTTP request, as far as it has come."""

    first: pb.ProcessingRequest
    headers: Mapping[str, str]
    request_id: str
    trailers: bool = False
    """Whether something comes after the body."""

    @property
    def path(self) -> str:
        """Its path, with the query if it has one."""
        return self.headers.get(":path", "")

    @property
    def mode(self) -> "pb.BodySendMode.ValueType":
        """How its body comes; gateways that do not say are taken to send it in pieces."""
        config = self.first.protocol_config
        return config.request_body_mode if self.first.HasField("protocol_config") else pb.FULL_DUPLEX_STREAMED

    @property
    def buffered(self) -> bool:
        """Whether the body comes in one message, after the headers were answered."""
        return self.mode == pb.BUFFERED

    @property
    def asks(self) -> bool:
        """Whether an answer that comes whole can be asked for.

        Envoy ignores it in other modes (`ext_proc.cc`, ``onReceiveMessage``).
        """
        return self.buffered and self.first.protocol_config.response_body_mode == pb.NONE

    def check_modes(self) -> None:
        """Raises ApiError (500) when bodies come in ways that cannot be used."""
        if self.mode not in (pb.BUFFERED, pb.FULL_DUPLEX_STREAMED):
            raise ApiError(500, "the gateway must send bodies of requests BUFFERED or FULL_DUPLEX_STREAMED")
        if self.first.protocol_config.response_body_mode not in (pb.NONE, pb.FULL_DUPLEX_STREAMED):
            raise ApiError(500, "the gateway must send no bodies of answers, or FULL_DUPLEX_STREAMED")


class ExternalProcessor(ext_proc_pb2_grpc.ExternalProcessorServicer):
    """Serves streams, each of them one HTTP request."""

    def __init__(self, *, turns: Turns, admission: Admission, body_limit_bytes: int, receive_s: float) -> None:
        """``receive_s``: a client's sending of its body, seconds."""
        self._turns = turns
        self._admission = admission
        self._body_limit_bytes = body_limit_bytes
        self._receive_s = receive_s
        self._answered: set[Exchange] = set()
        """Those whose engine has answered."""
        self._leaving = False

    async def Process(  # type: ignore[override]  # it writes; the stub only knows handlers that yield
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: Context
    ) -> None:
        """Accompanies one HTTP request."""
        async with Exchange(request_iterator, context.write) as exchange:
            with suppress(GoneError):
                await self._accompany(exchange, metadata_of(context))

    def leave(self) -> None:
        """Ends the streams of requests that were answered, in good order: what they still get needs nobody here.

        A gateway may cut off those whose streams end by an error.
        """
        self._leaving = True
        for exchange in self._answered:
            exchange.end()

    async def _accompany(self, exchange: Exchange, metadata: Mapping[str, str]) -> None:
        first = await exchange.next()
        headers = messages.headers_in(first.request_headers)
        if "traceparent" not in headers:
            # A gateway that begins a trace tells it to the engine, and until then with this call alone.
            headers = {**headers, **{name: metadata[name] for name in TRACE_HEADERS if name in metadata}}
        request = _Request(first, headers, request_id_in(headers))
        with structlog.contextvars.bound_contextvars(request_id=request.request_id):
            try:
                async with AsyncExitStack() as stack:
                    async with exchange.attended():
                        forwarded, address = await stack.enter_async_context(self._begun(exchange, request))
                    await self._give(exchange, request, forwarded, address)
                    await self._follow(exchange, request, forwarded, address)
            except ApiError as error:
                await exchange.write(messages.refusal(error, request.request_id, request.path))

    # The request

    @asynccontextmanager
    async def _begun(self, exchange: Exchange, request: _Request) -> AsyncIterator[tuple[Forwarded, str]]:
        """Runs a turn up to its decode leg; yields that and where it goes. Raises ApiError."""
        headers = request.headers
        endpoint = gateway.endpoint_of(headers, body_limit=self._body_limit_bytes)
        request.check_modes()
        tenant = self._turns.authenticate(authorization_in(headers, endpoint.value))
        async with self._admission.turn(tenant, left_s=left_s(headers)) as held:
            turn = turn_request(endpoint, headers, await self._body(exchange, request, held), tenant)
            turn = replace(turn, endpoints=messages.subset_in(request.first))
            async with self._turns.forward(turn) as forwarded:
                if forwarded.names_hosts and not request.asks:
                    raise ApiError(500, "the gateway must send bodies BUFFERED for engines without the connector")
                if forwarded.streams_hosts:
                    raise ApiError(500, "engines without the connector stream no responses through a gateway")
                yield forwarded, await _place(forwarded)

    async def _body(self, exchange: Exchange, request: _Request, held: Held) -> bytes:
        """Reads the whole body. Raises ApiError (400, 408, 413, 429)."""
        if request.first.request_headers.end_of_stream:
            raise ApiError(400, "there is no body")
        if request.buffered:
            await exchange.write(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))
        body = bytearray()
        try:
            async with asyncio.timeout(self._receive_s):
                async for piece in self._pieces(exchange, request):
                    if held.byte_count + len(piece) > self._body_limit_bytes:
                        raise gateway.too_large(self._body_limit_bytes)
                    held.grow(len(piece))
                    body += piece
        except TimeoutError as error:
            raise ApiError(408, f"the body took more than {self._receive_s:g} s") from error
        return bytes(body)

    async def _pieces(self, exchange: Exchange, request: _Request) -> AsyncIterator[bytes]:
        while True:
            message = await exchange.next()
            if message.HasField("request_trailers"):
                request.trailers = True
                return
            yield message.request_body.body
            # Trailers come after the answer to a body that is sent at once.
            if message.request_body.end_of_stream or request.buffered:
                return

    async def _give(self, exchange: Exchange, request: _Request, forwarded: Forwarded, address: str) -> None:
        """Gives the gateway the decode leg. From the first message on the engine may have it."""
        forwarded.taken()
        for answer in _leg(request, forwarded, address):
            await exchange.write(answer)

    # The answer

    async def _follow(self, exchange: Exchange, request: _Request, forwarded: Forwarded, address: str) -> None:
        """Sees an answer through: its head, all of it if it comes whole, its end. Raises ApiError, GoneError."""
        try:
            head = await _after_request(exchange)
            if await self._head(exchange, request, forwarded, address, head) and not self._leaving:
                self._answered.add(exchange)
                await _until_end(exchange)
        except (GoneError, asyncio.CancelledError):
            # A gateway resets its stream when it needs nothing more of it, and gRPC cancels the call then.
            if not forwarded.seen:
                forwarded.left()
                raise
        finally:
            self._answered.discard(exchange)
        forwarded.ended()

    async def _head(
        self, exchange: Exchange, request: _Request, forwarded: Forwarded, address: str, message: pb.ProcessingRequest
    ) -> bool:
        """Takes an answer's head, and the rest of one that comes whole. Tells whether anything follows."""
        headers, details = messages.headers_in(message.response_headers), messages.details_in(message)
        status = messages.status_in(headers)
        failure = gateway.failure_told(status, details)
        own = failure is not None and gateway.own_answer(details)
        streams = not gateway.comes_whole(status, headers)
        whole = not streams and request.asks and not own and not message.response_headers.end_of_stream
        served = messages.served_in(message)
        # It was told an address; the node may name a host.
        served = forwarded.endpoint if served == address else served
        told = forwarded.answered(status, failure, served=served, streams=streams, whole=whole)
        if failure is not None and own:
            error = EngineError(failure).as_api_error("decode")
            await exchange.write(messages.replacement(error, request.request_id, request.path))
            return False
        ours = {**told, **(STREAM_HEADERS if streams else {}), "x-request-id": request.request_id}
        removed = gateway.not_for_clients(headers.keys() - ours.keys())
        await exchange.write(messages.answer_head(messages.mutation(ours, removed), whole=whole))
        if whole:
            body = (await exchange.next()).response_body.body
            await exchange.write(messages.answer_body(forwarded.whole(body)))
        return not whole


def _leg(request: _Request, forwarded: Forwarded, address: str) -> Iterator[pb.ProcessingResponse]:
    """Yields what makes the client's request a decode leg."""
    leg = forwarded.leg
    headers = {
        **leg.headers,
        "content-type": "application/json",
        "content-length": str(len(leg.body)),
        gateway.DESTINATION: address,
    }
    mutation = messages.mutation(headers, gateway.not_for_engines(request.headers.keys() - headers.keys()))
    metadata = messages.destination(address, leg.expectation)
    if request.buffered:
        return messages.at_once(mutation, leg.body, metadata)
    return messages.in_pieces(mutation, leg.body, metadata, trailers=request.trailers)


async def _place(forwarded: Forwarded) -> str:
    """Returns where a turn goes, ip:port. Raises ApiError (503)."""
    try:
        return await _address(forwarded.endpoint)
    except ApiError as error:
        # It is as one that refuses connections: the next turn goes elsewhere.
        forwarded.answered(error.status, Failure.REFUSED, served="", streams=False, whole=False)
        raise


async def _address(endpoint: str) -> str:
    """Returns ip:port: gateways take no names of hosts. Raises ApiError (503)."""
    host, port = split_address(endpoint)
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return endpoint
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        # What no name can be is a UnicodeError.
        raise ApiError(503, "the decode engine's address cannot be found", headers={"retry-after": "1"}) from error
    return join_address(str(found[0][4][0]), port)


async def _after_request(exchange: Exchange) -> pb.ProcessingRequest:
    """Returns the first message about the answer. Raises GoneError."""
    message = await exchange.next()
    if message.HasField("request_trailers"):
        await exchange.write(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        message = await exchange.next()
    return message


async def _until_end(exchange: Exchange) -> None:
    """Lets pass what the gateway sends of the answer: nothing, unless it is configured to. Raises GoneError."""
    while True:
        message = await exchange.next()
        if message.HasField("response_body"):
            await exchange.write(messages.same_piece(message.response_body))
        elif message.HasField("response_trailers"):
            await exchange.write(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
