"""A connector without an engine: speaks the connector's end of `wire` over the agent's Unix socket."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from backhaul_connector import wire
from backhaul_connector.anchors import AnchorChain, Anchors

WEIGHTS = "weights-digest"


def hello(**changes: Any) -> wire.Hello:
    """Returns a complete hello."""
    fields: dict[str, Any] = {
        "protocol": wire.PROTOCOL_VERSION,
        "engine_id": "engine-1",
        "rank": 0,
        "connector_version": "0.1.0",
        "vllm_version": "0.32.0",
        "weights_digest": WEIGHTS,
        "block_size": 32,
        "block_count": 1000,
        "tp_size": 1,
        "ttl_s": 480.0,
        "lease_s": 180.0,
        "recompute_threshold": 64,
        "side_channel_host": "127.0.0.1",
        "side_channel_port": 5601,
        "now": 0.0,
    }
    return wire.Hello(**{**fields, **changes})


def report(
    set_id: str = "set-1",
    *,
    token_count: int = 100,
    block_ids: Sequence[int] = (1, 2, 3, 4),
    deadline: float,
    **changes: Any,
) -> wire.BlockSetReport:
    """Returns a report with true anchors of the tokens 0, 1, 2, and so on."""
    identity = b"i" * 16
    chain = AnchorChain(identity, 64)
    chain.extend(range(token_count))
    anchors = Anchors.of(chain, identity)
    fields: dict[str, Any] = {
        "set_id": set_id,
        "scope": "scope-1",
        "keys": [f"key-of-{set_id}"],
        "params": {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [list(block_ids)],
            "remote_engine_id": "engine-1",
            "remote_request_id": set_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5601,
            "tp_size": 1,
            "remote_num_tokens": token_count,
            "remote_blocks_expiry_time": deadline,
        },
        "token_count": token_count,
        "block_count": len(block_ids),
        "identity": identity,
        "stride": anchors.stride,
        "spacing": anchors.spacing,
        "anchors": anchors.digests,
        "deadline": deadline,
        "ended_at": deadline - 480.0,
        "turn_s": 1.0,
    }
    return wire.BlockSetReport(**{**fields, **changes})


@dataclass
class FakeConnector:
    """An engine's ledger and its connections to an agent. Survives reconnects, like the engine that it stands for."""

    path: Path
    greeting: wire.Hello = field(default_factory=hello)
    clock_offset: float = 1000.0
    """How far the engine's clock is ahead of the event loop's."""
    answers_pings: bool = True
    dropped_count: int = 0
    foreign_count: int = 0
    sets: dict[str, wire.BlockSetReport] = field(default_factory=dict)
    heard: list[wire.FromAgent] = field(default_factory=list)
    last_session: str = ""
    _writer: asyncio.StreamWriter | None = None
    _task: asyncio.Task[None] | None = None

    @property
    def now(self) -> float:
        """The engine's clock."""
        return asyncio.get_running_loop().time() + self.clock_offset

    async def connect(self) -> None:
        """Connects, greets, and replays once it is welcome."""
        reader, self._writer = await asyncio.open_unix_connection(str(self.path), limit=wire.MAX_LINE_BYTES)
        self.send(msgspec.structs.replace(self.greeting, now=self.now, last_session=self.last_session))
        self._task = asyncio.create_task(self._listen(reader))

    async def close(self) -> None:
        """Cuts the connection."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._writer is not None:
            self._writer.transport.abort()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None

    @property
    def cut(self) -> bool:
        """Whether the agent ended the connection."""
        return self._task is None or self._task.done()

    def retain(self, set_id: str = "set-1", *, ttl_s: float = 480.0, **changes: Any) -> wire.BlockSetReport:
        """Retains a set and reports it."""
        held = report(set_id, deadline=self.now + ttl_s, **changes)
        self.sets[set_id] = held
        self.send(wire.Retained(set=held))
        return held

    def free(self, *set_ids: str) -> None:
        """Frees sets and reports that."""
        for set_id in set_ids:
            self.sets.pop(set_id, None)
        self.send(wire.Freed(set_ids=list(set_ids)))

    def confirm(self, set_id: str, deadline: float) -> None:
        """Moves a deadline and reports it."""
        self.sets[set_id] = msgspec.structs.replace(self.sets[set_id], deadline=deadline)
        self.send(wire.Deadlines(deadlines={set_id: deadline}))

    def send(self, message: wire.FromConnector) -> None:
        """Writes one message, if connected."""
        self.send_bytes(wire.encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Writes anything, if connected."""
        if self._writer is not None:
            self._writer.write(data)

    def count(self, kind: type[wire.FromAgent], where: Callable[[Any], bool] = lambda _: True) -> int:
        """Returns how many messages of a kind came."""
        return sum(isinstance(message, kind) and where(message) for message in self.heard)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                message = wire.decode_from_agent(line)
                self.heard.append(message)
                self._answer(message)

    def _answer(self, message: wire.FromAgent) -> None:
        match message:
            case wire.Welcome():
                self.last_session = message.session
                for held in self.sets.values():
                    self.send(wire.Retained(set=held, replayed=True))
                self.send(wire.Replayed(set_count=len(self.sets)))
            case wire.Ping() if self.answers_pings:
                counts = {"dropped_count": self.dropped_count, "foreign_count": self.foreign_count}
                self.send(wire.Pong(token=message.token, now=self.now, **counts))
            case wire.Claimed():
                self._mark(message.set_id, True)
            case wire.Returned():
                self._mark(message.set_id, False)
            case _:
                pass

    def _mark(self, set_id: str, claimed: bool) -> None:
        if set_id in self.sets:
            self.sets[set_id] = msgspec.structs.replace(self.sets[set_id], claimed=claimed)
