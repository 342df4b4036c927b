"""What the vLLM server says of itself: health, progress, models, version over HTTP, its engines over the side channel.

Asks for ever, so that whatever changes is noticed: an adapter loaded later, an engine that restarted within a blink. A
server that does not answer is not ready; only another engine id means that the engine before it is gone. On a busy
machine a healthy server answers late now and then: only several time-outs in a row count.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import aiohttp
import msgspec
import structlog
import zmq
import zmq.asyncio

from backhaul_common.addresses import join_address
from backhaul_common.clock import Clock
from backhaul_common.texts import clip
from backhaul_common.tls import CallerContext
from backhaul_node_agent.core import bounds
from backhaul_node_agent.core.draining import Load
from backhaul_node_agent.core.node import ServerFacts, SideChannelFacts
from backhaul_node_agent.core.progress import Figures, Progress, read_figures, request_count

_log = structlog.get_logger(__name__)

_HTTP_S = 2.0
_HEALTH_ATTEMPTS = 3
_SIDE_CHANNEL_S = 2.0
_HEALTH_EVERY_S = 1.0
_MODELS_EVERY_S = 5.0
_SIDE_CHANNEL_EVERY_S = 5.0
_MAX_MODELS = 1_000
_MAX_BODY_BYTES = 4 * 1024 * 1024
_MAX_REPLY_BYTES = 16 * 1024 * 1024
"""Longest part of a side channel's reply, mostly NIXL's metadata; a peer that sends more is cut off."""


OnClock = Callable[[int, str, float, float | None, float], None]
"""Takes a rank, its engine's id, and when it was asked, what its clock showed (None: unknown) and when that came."""


class SideChannelError(Exception):
    """The side channel did not answer, or not as expected."""


@dataclass(frozen=True, slots=True)
class HandshakeReply:
    """What one rank of an engine answers to NIXL's handshake."""

    facts: SideChannelFacts
    agent_metadata: bytes
    """For `nixl_agent.add_remote_agent`."""
    now: float | None = None
    """The engine's clock, as it answered."""


# The parts that are read of vLLM's messages (nixl/metadata.py, `NixlHandshakePayload` and `NixlAgentMetadata`).
class _Payload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


class _Metadata(msgspec.Struct):
    engine_id: str
    agent_metadata: bytes
    num_blocks: int
    block_size: int


class SideChannel:
    """Speaks NIXL's handshake (nixl/base_scheduler.py, `_nixl_handshake_listener`)."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context

    async def ask(self, host: str, port: int, tp_rank: int = 0) -> HandshakeReply:
        """Asks one rank.

        Raises SideChannelError when there is no proper answer within 2 s.
        """
        try:
            with self._context.socket(zmq.REQ) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.IPV6, 1)
                socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REPLY_BYTES)
                socket.connect(f"tcp://{join_address(host, port)}")
                async with asyncio.timeout(_SIDE_CHANNEL_S):
                    await socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, tp_rank)))
                    parts = await socket.recv_multipart()
                return _reply(parts)
        except TimeoutError:
            raise SideChannelError("no answer") from None
        except zmq.ZMQError as error:
            raise SideChannelError(str(error)) from error


def _reply(parts: list[bytes]) -> HandshakeReply:
    try:
        payload = msgspec.msgpack.decode(parts[0], type=_Payload)
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=_Metadata)
        bounds.check_text(metadata.engine_id, "engine_id", required=True)
        bounds.check_text(payload.compatibility_hash, "compatibility_hash")
        bounds.check_count(metadata.block_size, "block_size")
        bounds.check_count(metadata.num_blocks, "num_blocks")
    except (msgspec.DecodeError, RecursionError, IndexError, bounds.OutOfBoundsError) as error:
        raise SideChannelError(str(error)) from error
    facts = SideChannelFacts(metadata.engine_id, payload.compatibility_hash, metadata.block_size, metadata.num_blocks)
    return HandshakeReply(facts, metadata.agent_metadata, _clock(parts))


def _clock(parts: list[bytes]) -> float | None:
    """Reads the engine's clock, which follows the payload; None when it is missing or nothing that a clock shows."""
    try:
        now = msgspec.msgpack.decode(parts[1], type=float)
        bounds.check_instant(now, "clock")
    except (msgspec.DecodeError, IndexError, bounds.OutOfBoundsError):
        return None
    return now


class EngineProbe:
    """Asks the server and its side channel, and reports what changed."""

    def __init__(
        self,
        *,
        engine_url: str,
        side_channel: tuple[str, int],
        channel: SideChannel,
        clock: Clock,
        ranks: Callable[[], Iterable[int]],
        stall_s: float,
        tls: CallerContext | None = None,
        api_key: str = "",
    ) -> None:
        """`side_channel` is that of rank 0; `ranks` names the data-parallel ranks to ask; `api_key` is the server's.

        An engine that has requests and stands still for `stall_s` seconds is not healthy, whatever the server says.
        """
        self._url = engine_url
        self._host, self._port = side_channel
        self._channel = channel
        self._clock = clock
        self._ranks = ranks
        self._progress = Progress(stall_s)
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def run(
        self,
        on_server: Callable[[ServerFacts], None],
        on_engine: Callable[[int, SideChannelFacts], None],
        on_clock: OnClock = lambda rank, engine_id, sent, now, received: None,
        on_load: Callable[[Load], None] = lambda load: None,
    ) -> None:
        """Asks until cancelled. `on_engine` gets the rank and what its engine answered, `on_clock` when.

        `on_load` gets what the engines have to do.
        """
        timeout = aiohttp.ClientTimeout(total=_HTTP_S)
        # `trust_env` stays off: the server is beside this agent, no proxy is on the way.
        session = aiohttp.ClientSession(timeout=timeout, trust_env=False, headers=self._headers)
        async with session as http, asyncio.TaskGroup() as group:
            group.create_task(self._watch_server(http, on_server, on_load))
            group.create_task(self._watch_engines(on_engine, on_clock))

    async def _watch_server(
        self, http: aiohttp.ClientSession, on_server: Callable[[ServerFacts], None], on_load: Callable[[Load], None]
    ) -> None:
        facts, details_due = ServerFacts(), 0.0
        while True:
            problem, load = await self._look(http)
            on_load(load)
            recovered = not problem and not facts.healthy
            if not problem and (recovered or not facts.models or self._clock.monotonic() >= details_due):
                facts = await self._details(http, facts)
                details_due = self._clock.monotonic() + _MODELS_EVERY_S
            if problem != facts.problem:
                _log.info("engine health changed", healthy=not problem, problem=problem)
            facts = replace(facts, healthy=not problem, problem=problem)
            on_server(facts)
            await self._clock.sleep(_HEALTH_EVERY_S)

    async def _look(self, http: aiohttp.ClientSession) -> tuple[str, Load]:
        """Returns why the server is not healthy, empty when it is, and what its engines have to do.

        Only time-outs are tried again.
        """
        asked_at = self._clock.monotonic()
        for _ in range(_HEALTH_ATTEMPTS):
            try:
                async with self._get(http, "/health") as response:
                    if response.status != 200:
                        return f"the server's health check answers {response.status}", Load(None, asked_at)
            except TimeoutError:
                continue
            except aiohttp.ClientError as error:
                count = 0 if _refused(error) else None
                return f"the server does not answer: {_why(error)}", Load(count, asked_at)
            figures = await self._figures(http)
            problem = self._progress.problem(figures, self._clock.monotonic())
            return problem, Load(request_count(figures), asked_at, figures)
        return f"the server does not answer: {_HEALTH_ATTEMPTS} time-outs in a row", Load(None, asked_at)

    async def _figures(self, http: aiohttp.ClientSession) -> dict[int, Figures]:
        """Returns the figures of each engine; none when the server does not show them."""
        try:
            async with self._get(http, "/metrics") as response:
                shown = await _body(response) if response.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError):
            shown = b""
        return read_figures(shown.decode(errors="replace"))

    async def _details(self, http: aiohttp.ClientSession, known: ServerFacts) -> ServerFacts:
        """Returns the facts with models and version as they are now; what cannot be learnt stays as it was."""
        listed = await self._json(http, "/v1/models")
        models = _names(listed)
        answer = await self._json(http, "/version")
        named = answer.get("version") if isinstance(answer, dict) else None
        version = clip(named, bounds.MAX_TEXT_BYTES) if isinstance(named, str) else known.version
        if not models:
            return replace(known, version=version)
        return replace(known, models=models, base_models=_names(listed, bases=True), version=version)

    async def _json(self, http: aiohttp.ClientSession, path: str) -> object:
        try:
            async with self._get(http, path) as response:
                if response.status != 200:
                    return None
                return document_in(await _body(response))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            _log.debug("engine did not answer", path=path, error=type(error).__name__)
            return None

    def _get(self, http: aiohttp.ClientSession, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return http.get(self._url + path, allow_redirects=False, ssl=self._tls.current() if self._tls else True)

    async def _watch_engines(self, on_engine: Callable[[int, SideChannelFacts], None], on_clock: OnClock) -> None:
        told: dict[int, str] = {}
        while True:
            # At once: one that does not answer must not keep the others waiting.
            await asyncio.gather(*(self._ask(rank, told, on_engine, on_clock) for rank in sorted(self._ranks())))
            await self._clock.sleep(_SIDE_CHANNEL_EVERY_S)

    async def _ask(
        self, rank: int, told: dict[int, str], on_engine: Callable[[int, SideChannelFacts], None], on_clock: OnClock
    ) -> None:
        sent = self._clock.monotonic()
        try:
            reply = await self._channel.ask(self._host, self._port + rank)
        except SideChannelError as error:
            if told.get(rank) != str(error):
                _log.info("side channel does not answer", rank=rank, port=self._port + rank, error=str(error))
            told[rank] = str(error)
            return
        told.pop(rank, None)
        on_clock(rank, reply.facts.engine_id, sent, reply.now, self._clock.monotonic())
        on_engine(rank, reply.facts)


def _refused(error: aiohttp.ClientError) -> bool:
    """Tells whether nobody listens there; then nothing runs."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)


def _why(error: aiohttp.ClientError) -> str:
    """Returns why a server does not answer, in words for operators."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not accepted: {error.certificate_error}"
    if _refused(error):
        return "nobody listens at its address"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return error.os_error.strerror
    return f"the connection failed ({type(error).__name__})"


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Returns the body, however many pieces it comes in, cut at 4 MiB."""
    body = bytearray()
    while len(body) < _MAX_BODY_BYTES and (piece := await response.content.readany()):
        body += piece
    return bytes(body[:_MAX_BODY_BYTES])


def document_in(body: bytes) -> object:
    """Returns what a JSON body says. Raises ValueError."""
    try:
        return msgspec.json.decode(body)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _names(models: object, *, bases: bool = False) -> tuple[str, ...]:
    """Returns what is served; with `bases` without adapters, which name a parent (`openai/models/serving.py`)."""
    data = models.get("data") if isinstance(models, dict) else None
    entries = data if isinstance(data, list) else []
    found = [entry for entry in entries[:_MAX_MODELS] if isinstance(entry, dict)]
    ids = (entry.get("id") for entry in found if not bases or entry.get("parent") is None)
    return tuple(name for name in ids if isinstance(name, str) and name)
