"""Notifications to engines: over real NIXL where it is installed, and what the agent does without."""

import asyncio
import builtins
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq.asyncio
from structlog.testing import capture_logs

from backhaul_node_agent import instruments, nixl_notifier
from backhaul_node_agent.core.events import SendRelease, SendRenewal
from backhaul_node_agent.engine_probe import SideChannel
from backhaul_node_agent.nixl_notifier import EngineAddress, NixlAgent, NixlNotifier, open_nixl
from tests.fakes.eventually import eventually
from tests.fakes.readings import Readings
from tests.fakes.side_channel import FakeSideChannel


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


class FakeNixl:
    """A NIXL agent that records what is sent; notifications leave only while it is polled, as the real one's do."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bytes]] = []
        self.removed: list[Any] = []
        self.fails = False
        self.fails_to_poll = False
        self._waiting: list[tuple[Any, bytes]] = []

    def add_remote_agent(self, metadata: bytes) -> Any:
        return f"peer-{metadata.decode()}"

    def remove_remote_agent(self, agent: Any) -> None:
        self.removed.append(agent)

    def send_notif(self, remote_agent_name: Any, notif_msg: bytes) -> None:
        if self.fails:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self._waiting.append((remote_agent_name, notif_msg))

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        if self.fails_to_poll:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.sent += self._waiting
        self._waiting.clear()
        return {}


class SlowToMeet(FakeNixl):
    """Its peers take a moment to shake hands; until then nothing leaves."""

    def __init__(self, meets_s: float) -> None:
        super().__init__()
        self.accepted: list[bytes] = []
        self._meets_s = meets_s
        self._met_at = 0.0

    def add_remote_agent(self, metadata: bytes) -> Any:
        self._met_at = time.monotonic() + self._meets_s
        return super().add_remote_agent(metadata)

    def send_notif(self, remote_agent_name: Any, notif_msg: bytes) -> None:
        self.accepted.append(notif_msg)
        super().send_notif(remote_agent_name, notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return super().get_new_notifs() if time.monotonic() >= self._met_at else {}


@contextlib.asynccontextmanager
async def notifying(
    context: zmq.asyncio.Context, nixl: NixlAgent | None, *addresses: tuple[str, EngineAddress]
) -> AsyncIterator[NixlNotifier]:
    notifier = NixlNotifier(ask=SideChannel(context).ask, address_of=dict(addresses).get, open_agent=lambda: nixl)
    running = asyncio.create_task(notifier.run())
    try:
        if nixl is not None:
            await eventually(lambda: notifier.available)
        yield notifier
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_the_first_notification_leaves_though_the_engine_takes_its_time(context: zmq.asyncio.Context) -> None:
    nixl = SlowToMeet(0.2)
    with FakeSideChannel() as engine:
        async with notifying(context, nixl, ("engine-1", EngineAddress("127.0.0.1", engine.port, 1))) as notifier:
            notifier.send(SendRelease("engine-1", "set-1"))
            await eventually(lambda: bool(nixl.sent))
    assert nixl.sent == [("peer-m", b"set-1:1")]


async def test_nothing_waits_until_what_was_sent_before_has_left(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_notifier, "_MEET_S", 30.0)
    nixl = SlowToMeet(30.0)
    with FakeSideChannel() as engine:
        async with notifying(context, nixl, ("engine-1", EngineAddress("127.0.0.1", engine.port, 1))) as notifier:
            notifier.send(SendRelease("engine-1", "set-1"))
            await eventually(lambda: len(nixl.accepted) == 1)
            notifier.send(SendRelease("engine-1", "set-2"))
            await eventually(lambda: len(nixl.accepted) == 2)


async def test_releases_and_renewals_go_to_every_rank(context: zmq.asyncio.Context) -> None:
    nixl = FakeNixl()
    with FakeSideChannel() as engine:
        address = EngineAddress("127.0.0.1", engine.port, tp_size=2)
        async with notifying(context, nixl, ("engine-1", address)) as notifier:
            notifier.send(SendRelease("engine-1", "set-1"))
            notifier.send(SendRenewal("engine-1", ("set-2", "set-3")))
            await eventually(lambda: len(nixl.sent) == 4)
    assert nixl.sent == [("peer-m", b"set-1:1"), ("peer-m", b"HB:set-2,set-3")] * 2
    assert engine.asked == [[b"get_meta_msg", 0, 0], [b"get_meta_msg", 0, 1]]


async def test_another_incarnation_on_the_side_channel_is_told_nothing(
    read: Readings, context: zmq.asyncio.Context
) -> None:
    nixl = FakeNixl()
    with FakeSideChannel("engine-2") as engine:
        address = EngineAddress("127.0.0.1", engine.port, tp_size=1)
        async with notifying(context, nixl, ("engine-1", address), ("engine-2", address)) as notifier:
            notifier.send(SendRelease("engine-1", "set-1"))
            notifier.send(SendRelease("engine-2", "set-2"))
            await eventually(lambda: bool(nixl.sent))
    assert nixl.sent == [("peer-m", b"set-2:1")]
    assert read.counted(instruments.LOST_NOTIFICATIONS) == {("not_sent",): 1}


async def test_a_peer_that_failed_is_met_anew(read: Readings, context: zmq.asyncio.Context) -> None:
    nixl = FakeNixl()
    with FakeSideChannel() as engine:
        address = EngineAddress("127.0.0.1", engine.port, tp_size=1)
        async with notifying(context, nixl, ("engine-1", address)) as notifier:
            nixl.fails = True
            notifier.send(SendRelease("engine-1", "set-1"))
            await eventually(lambda: read.counted(instruments.LOST_NOTIFICATIONS) == {("not_sent",): 1})
            nixl.fails = False
            notifier.send(SendRelease("engine-1", "set-1"))
            await eventually(lambda: nixl.sent == [("peer-m", b"set-1:1")])
    assert read.counted(instruments.LOST_NOTIFICATIONS) == {("not_sent",): 1}
    assert nixl.removed == ["peer-m"]
    assert len(engine.asked) == 2


async def test_nixl_that_fails_while_it_is_driven_is_driven_again(context: zmq.asyncio.Context) -> None:
    nixl = FakeNixl()
    with FakeSideChannel() as engine, capture_logs() as logs:
        address = EngineAddress("127.0.0.1", engine.port, tp_size=1)
        async with notifying(context, nixl, ("engine-1", address)) as notifier:
            nixl.fails_to_poll = True
            notifier.send(SendRelease("engine-1", "set-1"))
            await eventually(lambda: any("NIXL_ERR_BACKEND" in str(line) for line in logs))
            nixl.fails_to_poll = False
            notifier.send(SendRelease("engine-1", "set-2"))
            await eventually(lambda: ("peer-m", b"set-2:1") in nixl.sent)


async def test_what_finds_no_room_is_lost_and_counted(
    read: Readings, context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backhaul_node_agent.nixl_notifier.MAX_QUEUED", 1)
    async with notifying(context, FakeNixl()) as notifier:
        for set_id in ("set-1", "set-2", "set-3"):
            notifier.send(SendRelease("engine-1", set_id))
        assert read.counted(instruments.LOST_NOTIFICATIONS) == {("queue_full",): 2}


async def test_whether_engines_can_be_told_is_open_until_nixl_has_loaded(context: zmq.asyncio.Context) -> None:
    loaded = threading.Event()

    def load() -> NixlAgent:
        loaded.wait()
        return FakeNixl()

    notifier = NixlNotifier(ask=SideChannel(context).ask, address_of=lambda _: None, open_agent=load)
    running = asyncio.create_task(notifier.run())
    await asyncio.sleep(0)
    assert (notifier.starting, notifier.available) == (True, False)
    loaded.set()
    await eventually(lambda: not notifier.starting)
    assert notifier.available
    running.cancel()
    await asyncio.wait([running])


async def test_without_nixl_nothing_is_sent_and_the_agent_goes_on(context: zmq.asyncio.Context) -> None:
    async with notifying(context, None) as notifier:
        await eventually(lambda: not notifier.starting)
        assert not notifier.available
        notifier.send(SendRelease("engine-1", "set-1"))


def test_without_nixl_one_line_says_what_cannot_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_nixl(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == "nixl":
            raise ImportError("No module named 'nixl'")
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", no_nixl)
    monkeypatch.setattr("importlib.import_module", no_nixl)
    with capture_logs() as logs:
        assert open_nixl("agent") is None
    assert len(logs) == 1
    assert "cannot release or renew" in logs[0]["event"]


async def test_a_real_nixl_agent_gets_the_notifications(context: zmq.asyncio.Context) -> None:
    loop = asyncio.get_running_loop()
    engine_agent: Any = await loop.run_in_executor(None, open_nixl, "fake-engine")
    assert engine_agent is not None, "the tests need nixl: pip install --no-deps -r requirements-nixl.txt"
    got: list[bytes] = []

    def poll() -> bool:
        for messages in engine_agent.get_new_notifs().values():
            got.extend(messages)
        return got == [b"set-1:1", b"HB:set-2"]

    with FakeSideChannel(agent_metadata=engine_agent.get_agent_metadata()) as engine:
        address = EngineAddress("127.0.0.1", engine.port, tp_size=1)
        nixl = await loop.run_in_executor(None, open_nixl, "fake-agent")
        async with notifying(context, nixl, ("engine-1", address)) as notifier:
            notifier.send(SendRelease("engine-1", "set-1"))
            notifier.send(SendRenewal("engine-1", ("set-2",)))
            await eventually(poll, timeout_s=15)
