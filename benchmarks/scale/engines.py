"""Engines of which only the times and the caches are there; what their connectors tell the agents is complete."""

import asyncio
import json
import math
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec

from backhaul_connector import wire
from backhaul_connector.anchors import AnchorChain, Anchors
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_router.core.engines import Reply
from benchmarks.routing.clusters import BLOCK_SIZE, TRANSFER_BLOCK_S, Speed
from benchmarks.scale.meter import OTHERS, Meter

TTL_S, _LEASE_S = 480.0, 180.0
_IDENTITY = b"i" * 16
_STRIDE = 64
_TOKENIZE_S = 0.005
_PIECES = 4
"""Pieces that an answer comes in: what more of them cost a router, `benchmarks.gateway` measures."""

_PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"w"}}]}\n\n'


class _Leg(msgspec.Struct):
    """What an engine reads of a request."""

    user: str
    max_tokens: int = 1
    kv_transfer_params: dict[str, Any] = {}


class _Message(msgspec.Struct):
    content: str


class _Chat(msgspec.Struct):
    messages: list[_Message]


_decode_leg, _decode_chat = msgspec.json.Decoder(_Leg).decode, msgspec.json.Decoder(_Chat).decode


def _tokens(conversation: str, token_count: int) -> range:
    """Returns the tokens of a conversation: at each position another one than in other conversations."""
    first = crc32(conversation.encode()) % 1_000_000_000
    return range(first, first + token_count)


@dataclass(slots=True)
class VirtualEngine:
    """One engine, and what the connector inside tells of it."""

    node_id: str
    speed: Speed
    meter: Meter
    now: Callable[[], float]
    hear: ev.Hear = lambda _: None
    """Told what happens, as the agent is."""
    running: int = 0
    waiting: int = 0
    computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    cached: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Tokens by conversation, used least recently first."""
    retained: dict[str, int] = field(default_factory=dict)
    """Blocks by set."""

    @property
    def engine_id(self) -> str:
        """Its incarnation."""
        return f"{self.node_id}-engine"

    @property
    def facts(self) -> EngineFacts:
        """What its connector says when it connects."""
        return EngineFacts(
            engine_id=self.engine_id,
            rank=0,
            connector_version="1",
            vllm_version="0.32.0",
            weights_digest="w",
            block_size=BLOCK_SIZE,
            block_count=self.speed.block_count,
            tp_size=1,
            ttl_s=TTL_S,
            side_channel_host="10.0.0.1",
            side_channel_port=5600,
            lease_s=_LEASE_S,
        )

    @property
    def free_blocks(self) -> int:
        """Blocks that nothing retains."""
        return max(self.speed.block_count - sum(self.retained.values()), 0)

    def local(self, conversation: str, prompt: int) -> int:
        """Returns how many tokens of a prompt it has."""
        return min(self.cached.get(conversation, 0), prompt - 1)

    async def compute(self, token_count: int, *, moved: int = 0) -> None:
        """Takes its time, after what came before."""
        self.waiting += 1
        async with self.computing:
            self.waiting -= 1
            self.running += 1
            await asyncio.sleep(token_count / self.speed.prefill_tokens_per_s + moved / BLOCK_SIZE * TRANSFER_BLOCK_S)
            self.running -= 1

    def keep(self, conversation: str, token_count: int) -> None:
        """Caches a conversation."""
        self.cached[conversation] = token_count
        self.cached.move_to_end(conversation)
        room = self.speed.block_count * BLOCK_SIZE
        while sum(self.cached.values()) > room and len(self.cached) > 1:
            self.cached.popitem(last=False)

    def free(self, set_ids: tuple[str, ...]) -> None:
        """Lets go of sets, and says so."""
        gone = [set_id for set_id in set_ids if self.retained.pop(set_id, None) is not None]
        if gone:
            self.hear(ev.SetsFreed(1, self.engine_id, gone))

    def retain(self, leg: _Leg, label: Mapping[str, Any], name: str, token_count: int, turn_s: float) -> None:
        """Retains a turn's blocks, and says so."""
        chain = AnchorChain(_IDENTITY, _STRIDE)
        chain.extend(_tokens(leg.user, token_count))
        anchors = Anchors.of(chain, _IDENTITY)
        block_count = math.ceil(token_count / BLOCK_SIZE)
        self.retained[name] = block_count
        params: dict[str, Any] = {"remote_engine_id": self.engine_id, "remote_request_id": name}
        made = BlockSet(
            set_id=name,
            scope=label["scope"],
            keys=tuple(label["keys"]),
            params={
                **params,
                "remote_host": "10.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
                "remote_num_tokens": token_count,
            },
            token_count=token_count,
            block_count=block_count,
            identity=_IDENTITY,
            stride=_STRIDE,
            spacing=anchors.spacing,
            anchors=anchors.digests,
            block_ids=(array("i", range(block_count)),),
            ended_at=self.now(),
            turn_s=turn_s,
            continues=tuple(label.get("continues", ())),
        )
        self.hear(ev.Reported(1, self.engine_id, made, self.now() + TTL_S))


class Engines:
    """All engines, as a router sees them (`backhaul_router.ports.Engines`)."""

    def __init__(self, meter: Meter, prompts: Mapping[str, int], openings: Mapping[str, str]) -> None:
        """``prompts``: tokens of what each conversation has just sent; ``openings``: names by first words."""
        self.by_id: dict[str, VirtualEngine] = {}
        self.prompt_tokens = self.local_tokens = self.read_tokens = 0
        """Of prefill legs."""
        self._meter = meter
        self._prompts = prompts
        self._openings = openings

    def at(self, url: str) -> VirtualEngine:
        """Returns the engine at a URL."""
        return self.by_id[url.removeprefix("http://").partition(":")[0]]

    async def prefill(
        self, url: str, body: bytes, headers: Mapping[str, str], *, on_sent: Callable[[], None], **_: Any
    ) -> Reply:
        """Computes a prompt, or reads what another engine has of it."""
        on_sent()
        return await self._meter.within(OTHERS, self._prefill(self.at(url), _decode_leg(body), headers))

    async def _prefill(self, engine: VirtualEngine, leg: _Leg, headers: Mapping[str, str]) -> Reply:
        prompt = self._prompts[leg.user]
        local = engine.local(leg.user, prompt)
        proof = leg.kv_transfer_params.get(wire.PARAMS_KEY)
        read = max(min(proof["token_count"], prompt - 1) - local, 0) if proof else 0
        await engine.compute(prompt - local - read, moved=read)
        engine.keep(leg.user, prompt)
        self.prompt_tokens, self.local_tokens, self.read_tokens = (
            self.prompt_tokens + prompt,
            self.local_tokens + local,
            self.read_tokens + read,
        )
        if proof:
            holder = self.by_id[leg.kv_transfer_params["remote_engine_id"].removesuffix("-engine")]
            holder.free((leg.kv_transfer_params["remote_request_id"],))
        verdict: dict[str, Any] = {
            "prompt": prompt,
            "local": local,
            "read": read,
            "verified": local + read,
            "spent": bool(proof),
        }
        params: dict[str, Any] = {"remote_engine_id": engine.engine_id, "remote_request_id": headers["x-request-id"]}
        full = {**params, "remote_host": "h", "remote_block_ids": [[1]], wire.PARAMS_KEY: {**verdict, "refused": ""}}
        return Reply(200, {}, json.dumps({"kv_transfer_params": full, "usage": {"prompt_tokens": prompt}}).encode())

    @asynccontextmanager
    async def decode(
        self, url: str, body: bytes, headers: Mapping[str, str], *, on_sent: Callable[[], None], **_: Any
    ) -> AsyncIterator["Answered"]:
        """Answers, after a hand-off or alone."""
        on_sent()
        engine, leg = self.at(url), _decode_leg(body)
        await self._meter.within(OTHERS, self._begin(engine, leg))
        answered = Answered(self, engine, leg, headers["x-request-id"])
        engine.running += 1
        try:
            yield answered
        finally:
            engine.running -= 1

    async def _begin(self, engine: VirtualEngine, leg: _Leg) -> None:
        prompt = self._prompts[leg.user]
        lacks = prompt - engine.local(leg.user, prompt)
        if "remote_engine_id" in leg.kv_transfer_params:
            await asyncio.sleep(lacks / BLOCK_SIZE * TRANSFER_BLOCK_S + engine.speed.decode_step_s)
        else:
            await engine.compute(lacks)
            await asyncio.sleep(engine.speed.decode_step_s)

    def ended(self, engine: VirtualEngine, leg: _Leg, name: str, turn_s: float) -> None:
        """An answer is complete."""
        token_count = self._prompts[leg.user] + leg.max_tokens - 1
        engine.keep(leg.user, token_count)
        if label := leg.kv_transfer_params.get(wire.PARAMS_KEY):
            with self._meter.paying(OTHERS):
                engine.retain(leg, label, name, token_count, turn_s)

    async def tokenize(self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> list[int]:
        """Returns the tokens of a prompt, by which routers tell block sets apart."""
        await self.pause(_TOKENIZE_S)
        name = self._openings[_decode_chat(body).messages[1].content]
        return [*_tokens(name, self._prompts[name])]

    def pause(self, seconds: float) -> Any:
        """Lets time pass for which no router pays."""
        return self._meter.within(OTHERS, asyncio.sleep(seconds))


class Answered:
    """A streamed answer (`backhaul_router.ports.Stream`)."""

    status = 200
    headers: Mapping[str, str] = {"content-type": "text/event-stream"}

    def __init__(self, engines: Engines, engine: VirtualEngine, leg: _Leg, name: str) -> None:
        self.complete = False
        self._engines = engines
        self._engine = engine
        self._leg = leg
        self._name = name

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields it."""
        yield _PIECE
        answer_s = self._engine.speed.decode_step_s * self._leg.max_tokens
        for _ in range(_PIECES - 1):
            await self._engines.pause(answer_s / (_PIECES - 1))
            yield _PIECE
        self._engines.ended(self._engine, self._leg, self._name, answer_s)
        self.complete = True
        yield b"data: [DONE]\n\n"

    async def read(self) -> bytes:
        """Returns it."""
        return b"".join([chunk async for chunk in self.chunks()])
