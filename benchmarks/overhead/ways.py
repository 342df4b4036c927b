"""The ways from a client to a decode engine's events."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import aiohttp
import grpc
import msgspec

from backhaul.router.v1 import router_pb2, router_pb2_grpc

PATH = "/v1/chat/completions"

_JSON = {"content-type": "application/json"}


class Way(Protocol):
    """One of them."""

    def turn(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """Runs one turn; yields its stream as it comes. Raises TurnError."""
        ...


class TurnError(Exception):
    """A turn that was not answered as it should be."""


class OverHttp:
    """Through whatever serves OpenAI's API at a URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url + PATH

    async def turn(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """Posts it."""
        async with self._session.post(self._url, data=msgspec.json.encode(body), headers=_JSON) as response:
            if response.status != 200:
                raise TurnError(f"{response.status} {(await response.text())[:200]}")
            async for piece in response.content.iter_any():
                yield piece


class Direct:
    """Through nothing: the client sends both legs itself, as little as that takes."""

    def __init__(self, session: aiohttp.ClientSession, prefill: str, decode: str) -> None:
        self._session = session
        self._prefill = prefill + PATH
        self._decode = OverHttp(session, decode)

    async def turn(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """Posts one leg, then the other with what the first one handed off."""
        first = {**body, "stream": False, "max_tokens": 1}
        async with self._session.post(self._prefill, data=msgspec.json.encode(first), headers=_JSON) as response:
            handed = msgspec.json.decode(await response.read())["kv_transfer_params"]
        async for piece in self._decode.turn({**body, "kv_transfer_params": handed}):
            yield piece


class OverGrpc:
    """Through a router's gRPC API."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: router_pb2_grpc.InferenceServiceAsyncStub = router_pb2_grpc.InferenceServiceStub(channel)

    async def turn(self, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """Calls it."""
        request = router_pb2.ChatCompletionsRequest(body=msgspec.json.encode(body))
        try:
            async for message in self._stub.ChatCompletions(request, timeout=120):
                if message.chunk:
                    yield message.chunk
        except grpc.aio.AioRpcError as error:
            raise TurnError(f"{error.code().name} {error.details()}") from error
