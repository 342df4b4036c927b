"""Tells engines over NIXL to keep or to free block sets. Needs the optional ``nixl``; without it, says so once.

A renewal is ``HB:<set_id>,<set_id>``, a release ``<set_id>:<consumers>`` (nixl/pull_worker.py, `_get_new_notifs`); each
goes to every tensor-parallel rank. The engine acknowledges neither: the connector's reports do.
"""

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from backhaul_common.metering import Counter
from backhaul_node_agent import instruments
from backhaul_node_agent.core.events import SendRelease, SendRenewal
from backhaul_node_agent.engine_probe import HandshakeReply, SideChannelError

_log = structlog.get_logger(__name__)

MAX_QUEUED = 10_000
"""Notifications that may wait. One more is dropped: releases are repeated until the engine confirms."""

_MAX_PER_ROUND = 256
_DRIVE_S = 0.05
"""How long the sender drives NIXL by hand after sending: without its progress thread (which would burn a core for ever)
a notification leaves only while `get_new_notifs` is called."""
_MEET_S = 0.5
"""The same for the first notification to a peer, which leaves once both have shaken hands: the engine answers with its
steps, of which an idle one may make few."""
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.008
"""Between two of these calls. Nearly always the first call is enough, and each one wakes a thread: the pauses grow."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine's ranks can be reached for the handshake."""

    host: str
    port: int
    tp_size: int


Ask = Callable[[str, int, int], Awaitable[HandshakeReply]]
"""`SideChannel.ask`."""


class NixlAgent(Protocol):
    """The part of ``nixl._api.nixl_agent`` that is used. Not thread-safe: one thread calls it."""

    def add_remote_agent(self, metadata: bytes) -> Any: ...

    def remove_remote_agent(self, agent: Any) -> None: ...

    def send_notif(self, remote_agent_name: Any, notif_msg: bytes) -> None: ...

    def get_new_notifs(self) -> Any: ...


def open_nixl(name: str) -> NixlAgent | None:
    """Makes a NIXL agent, or returns None (and logs it) where nixl is not installed."""
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        _log.warning(
            "nixl is not installed: this agent cannot release or renew block sets; they stay until the engine's own "
            "deadline (requirements-nixl.txt names what to install)",
            error=str(error),
        )
        return None
    try:
        agent: NixlAgent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except Exception as error:  # noqa: BLE001  # nixl's own exceptions have no common base; the agent goes on without
        _log.warning("nixl does not start: this agent cannot release or renew block sets", error=str(error))
        return None
    return agent


def message_of(effect: SendRelease | SendRenewal) -> bytes:
    """Returns the notification's text."""
    if isinstance(effect, SendRenewal):
        return ("HB:" + ",".join(effect.set_ids)).encode()
    return f"{effect.set_id}:1".encode()


class NixlNotifier:
    """Sends notifications, in order, from one thread."""

    def __init__(
        self, *, ask: Ask, address_of: Callable[[str], EngineAddress | None], open_agent: Callable[[], NixlAgent | None]
    ) -> None:
        """`address_of` finds the engine by its id, None when it is gone."""
        self._ask = ask
        self._address_of = address_of
        self._open_agent = open_agent
        self._agent: NixlAgent | None = None
        self._starting = True
        self._peers: dict[str, list[Any]] = {}
        self._queue: asyncio.Queue[SendRelease | SendRenewal] = asyncio.Queue(MAX_QUEUED)
        self._forgotten: list[str] = []
        self._drive_until = 0.0
        self._lost = Counter(instruments.LOST_NOTIFICATIONS)

    @property
    def available(self) -> bool:
        """Whether engines can be told anything."""
        return self._agent is not None

    @property
    def starting(self) -> bool:
        """Whether it is not known yet if engines can be told: nixl is about to load."""
        return self._starting

    def send(self, effect: SendRelease | SendRenewal) -> None:
        """Queues a notification; drops it without nixl, or when the queue is full."""
        if not self.available:
            return
        try:
            self._queue.put_nowait(effect)
        except asyncio.QueueFull:
            self._lost.add(1, "queue_full")
            _log.warning("notification dropped: too many wait", engine=effect.engine_id)

    def forget(self, engine_id: str) -> None:
        """Drops what leads to an engine that is gone."""
        self._forgotten.append(engine_id)

    async def run(self) -> None:
        """Sends until cancelled. Cancellation leaves queued notifications unsent; one round may end after it."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="nixl") as thread:
            # NIXL's calls block: loading its backend takes a second.
            self._agent = await loop.run_in_executor(thread, self._open_agent)
            self._starting = False
            try:
                while True:
                    batch = [await self._queue.get()]
                    while not self._queue.empty() and len(batch) < _MAX_PER_ROUND:
                        batch.append(self._queue.get_nowait())
                    await self._send_round(loop, thread, batch)
            finally:
                self._agent = None
                # The executor waits for its thread.
                self._drive_until = min(self._drive_until, time.monotonic() + _DRIVE_S)

    async def _send_round(
        self, loop: asyncio.AbstractEventLoop, thread: ThreadPoolExecutor, batch: Sequence[SendRelease | SendRenewal]
    ) -> None:
        by_engine: dict[str, list[bytes]] = {}
        for effect in batch:
            by_engine.setdefault(effect.engine_id, []).append(message_of(effect))
        sends: dict[str, tuple[list[HandshakeReply], list[bytes]]] = {}
        for engine_id, messages in by_engine.items():
            try:
                sends[engine_id] = (await self._replies(engine_id), messages)
            except SideChannelError as error:
                self._lost.add(len(messages), "not_sent")
                _log.warning("engine cannot be told over nixl", engine=engine_id, error=str(error), count=len(messages))
        await loop.run_in_executor(thread, self._deliver, sends)

    async def _replies(self, engine_id: str) -> list[HandshakeReply]:
        """Asks all ranks of an engine that is not known to NIXL yet."""
        if engine_id in self._peers and engine_id not in self._forgotten:
            return []
        address = self._address_of(engine_id)
        if address is None:
            raise SideChannelError("the engine is gone")
        replies = [await self._ask(address.host, address.port, rank) for rank in range(address.tp_size)]
        if any(reply.facts.engine_id != engine_id for reply in replies):
            raise SideChannelError("another engine answers on its side channel")
        return replies

    def _deliver(self, sends: dict[str, tuple[list[HandshakeReply], list[bytes]]]) -> None:
        # Runs on the nixl thread, while `run` waits for it.
        agent = self._agent
        assert agent is not None
        self._drop_forgotten(agent)
        for engine_id, (replies, messages) in sends.items():
            try:
                if replies:
                    self._peers[engine_id] = [agent.add_remote_agent(reply.agent_metadata) for reply in replies]
                for peer in self._peers[engine_id]:
                    for message in messages:
                        agent.send_notif(peer, message)
            except Exception as error:  # noqa: BLE001  # nixl's own exceptions have no common base; the core sends again
                self._forgotten.append(engine_id)
                self._lost.add(len(messages), "not_sent")
                _log.warning("notification not sent", engine=engine_id, error=str(error), count=len(messages))
        until = time.monotonic() + (_MEET_S if any(replies for replies, _ in sends.values()) else _DRIVE_S)
        try:
            self._drive(agent, until)
        except Exception as error:  # noqa: BLE001  # as above; the next round drives what is left
            _log.warning("nixl cannot be driven", error=str(error))

    def _drive(self, agent: NixlAgent, until: float) -> None:
        """Drives NIXL until all must have left. What comes to be sent meanwhile does not wait for that."""
        self._drive_until = max(self._drive_until, until)
        pause_s = _FIRST_PAUSE_S
        agent.get_new_notifs()
        while self._queue.empty() and (left_s := self._drive_until - time.monotonic()) > 0:
            time.sleep(min(pause_s, left_s))
            agent.get_new_notifs()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _drop_forgotten(self, agent: NixlAgent) -> None:
        while self._forgotten:
            for peer in self._peers.pop(self._forgotten.pop(), []):
                try:
                    agent.remove_remote_agent(peer)
                except Exception as error:  # noqa: BLE001  # the peer is dead: nothing is lost with it
                    _log.debug("peer not removed", error=str(error))
