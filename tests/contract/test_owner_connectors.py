"""The connector's socket: connections that are cut, replaced, mute, too loud or not ours."""

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from backhaul_common.clock import SystemClock
from backhaul_common.errors import UnavailableError
from backhaul_connector import wire
from backhaul_node_agent import instruments
from backhaul_node_agent.connector_server import ConnectorServer
from backhaul_node_agent.core import events as ev
from tests.fakes.connector import FakeConnector, hello, report
from tests.fakes.eventually import eventually
from tests.fakes.readings import Readings


class FastClock(SystemClock):
    """A second takes 20 ms, so that silence is soon noticed."""

    RATE = 50

    def monotonic(self) -> float:
        return super().monotonic() * self.RATE

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / self.RATE)


@dataclass
class Listening:
    """A server, and what it heard."""

    server: ConnectorServer
    path: Path
    heard: list[ev.Event] = field(default_factory=list)

    def of(self, kind: type[ev.Event]) -> list[ev.Event]:
        return [event for event in self.heard if isinstance(event, kind)]


@contextlib.asynccontextmanager
async def listening(path: Path, clock: SystemClock | None = None) -> AsyncIterator[Listening]:
    server = ConnectorServer(path=path, session="session-1", clock=clock or SystemClock())
    peer = Listening(server, path)
    server.open()
    running = asyncio.create_task(server.run(peer.heard.append))
    try:
        yield peer
    finally:
        running.cancel()
        await asyncio.wait([running])
        server.close()


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Listening]:
    async with listening(tmp_path / "run" / "agent.sock") as peer:
        yield peer


@pytest.fixture
async def connector(peer: Listening) -> AsyncIterator[FakeConnector]:
    connector = FakeConnector(peer.path)
    yield connector
    await connector.close()


async def test_a_connector_is_welcomed_and_replays_before_it_reports(peer: Listening, connector: FakeConnector) -> None:
    connector.sets["set-1"] = report("set-1", deadline=1e6, claimed=True)
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    connector.retain("set-2")
    await eventually(lambda: len(peer.of(ev.Reported)) == 2)
    connected = peer.of(ev.EngineConnected)[0]
    assert isinstance(connected, ev.EngineConnected)
    assert connected.facts.weights_digest == "weights-digest"
    first, second = peer.of(ev.Reported)
    assert isinstance(first, ev.Reported)
    assert isinstance(second, ev.Reported)
    assert (first.replayed, first.granted, second.replayed) == (True, True, False)
    await eventually(lambda: bool(peer.of(ev.ClockObserved)))


async def test_the_socket_belongs_to_its_user_alone(peer: Listening) -> None:
    assert stat.S_IMODE(peer.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(peer.path.parent.stat().st_mode) == 0o700


async def test_a_cut_connection_is_reported_and_the_next_one_is_served(
    peer: Listening, connector: FakeConnector
) -> None:
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    await connector.close()
    await eventually(lambda: bool(peer.of(ev.ConnectorLost)))
    await connector.connect()
    await eventually(lambda: len(peer.of(ev.ReplayFinished)) == 2)
    second = peer.of(ev.EngineConnected)[1]
    assert isinstance(second, ev.EngineConnected)
    assert second.last_session == "session-1"


async def test_the_newest_connection_of_an_engine_wins(peer: Listening, connector: FakeConnector) -> None:
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    newer = FakeConnector(peer.path)
    await newer.connect()
    await eventually(lambda: connector.cut and len(peer.of(ev.ReplayFinished)) == 2)
    assert await peer.server.flushed("engine-1", 1.0)
    peer.server.tell("engine-1", wire.Claimed(set_id="set-1"))
    await eventually(lambda: newer.count(wire.Claimed) == 1)
    assert connector.count(wire.Claimed) == 0
    await newer.close()


async def test_ranks_of_one_server_are_connected_side_by_side(peer: Listening, connector: FakeConnector) -> None:
    other = FakeConnector(peer.path, hello(engine_id="engine-2", rank=1))
    await connector.connect()
    await other.connect()
    await eventually(lambda: len(peer.of(ev.ReplayFinished)) == 2)
    assert not connector.cut
    assert await peer.server.flushed("engine-1", 1.0)
    assert await peer.server.flushed("engine-2", 1.0)
    await other.close()


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"\xff\xfe\n",
        b'{"type":"unknown"}\n',
        b'{"type":"freed","set_ids":"all"}\n',
        wire.encode(hello()),
        wire.encode(wire.Pong(token=1.0, now=1.0, dropped_count=0)),
        wire.encode(wire.Replayed(set_count=7)),
        wire.encode(wire.Identity(weights_digest="z" * 5_000)),
        wire.encode(wire.Deadlines(deadlines={"set-1": 1e300})),
        wire.encode(wire.Deadlines(deadlines={"set-1": -1e300})),
        b'{"type":"deadlines","deadlines":{"set-1":1e999}}\n',
        b"[" * 100_000 + b"\n",
    ],
    ids=[
        "empty",
        "no-type",
        "no-text",
        "unknown",
        "wrong-type",
        "second-hello",
        "unasked-pong",
        "lost-sets",
        "long-digest",
        "late-deadline",
        "early-deadline",
        "endless-deadline",
        "deep",
    ],
)
async def test_a_connection_that_breaks_the_protocol_is_closed(
    peer: Listening, connector: FakeConnector, line: bytes
) -> None:
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    connector.send_bytes(line)
    await eventually(lambda: connector.cut and bool(peer.of(ev.ConnectorLost)))
    await connector.close()
    await connector.connect()
    await eventually(lambda: len(peer.of(ev.ReplayFinished)) == 2)


@pytest.mark.parametrize(
    "changes",
    [{"block_count": 2**40}, {"ttl_s": 1e300}, {"weights_digest": "z" * 5_000}, {"rank": -1}, {"engine_id": ""}],
    ids=lambda changes: "-".join(changes),
)
async def test_a_hello_that_no_engine_says_is_refused_with_one_line_and_disturbs_nobody(
    peer: Listening, connector: FakeConnector, changes: dict[str, Any]
) -> None:
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    with capture_logs() as logs:
        for _ in range(3):
            await is_turned_away(FakeConnector(peer.path, hello(**changes)))
    assert len(peer.of(ev.EngineConnected)) == 1
    assert not connector.cut
    (line,) = [log for log in logs if log["log_level"] != "debug"]
    assert next(iter(changes)) in line["problem"]


async def is_turned_away(connector: FakeConnector) -> None:
    """Connects, and sees the connection ended."""
    await connector.connect()
    await eventually(lambda: connector.cut)
    await connector.close()


async def test_an_answer_to_a_ping_with_a_time_that_no_clock_shows_closes_the_connection(peer: Listening) -> None:
    connector = FakeConnector(peer.path, clock_offset=1e300)
    await connector.connect()
    await eventually(lambda: connector.cut and bool(peer.of(ev.ConnectorLost)))
    assert not peer.of(ev.ClockObserved)
    await connector.close()


async def test_what_a_connector_dropped_is_told_although_it_came_back_over_another_connection(
    read: Readings, peer: Listening, connector: FakeConnector
) -> None:
    with capture_logs() as logs:
        for count in (3, 8, 8):
            await comes_and_goes(peer, connector, dropped_count=count)
    assert [log["count"] for log in logs if log["event"] == "connector dropped messages"] == [5]
    assert read.of(instruments.CONNECTOR_DROPS) == {(): 5}


async def test_foreign_leases_are_those_of_engines_that_are_connected(
    peer: Listening, connector: FakeConnector
) -> None:
    connector.foreign_count = 7
    await connector.connect()
    await eventually(lambda: peer.server.foreign_count == 7)
    await connector.close()
    await eventually(lambda: peer.server.foreign_count == 0)


async def comes_and_goes(peer: Listening, connector: FakeConnector, *, dropped_count: int) -> None:
    """Connects, answers a ping, and leaves."""
    connector.dropped_count = dropped_count
    seen = len(peer.of(ev.ClockObserved))
    await connector.connect()
    await eventually(lambda: len(peer.of(ev.ClockObserved)) > seen)
    await connector.close()


async def test_a_line_over_the_limit_closes_the_connection(peer: Listening, connector: FakeConnector) -> None:
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    connector.send_bytes(b"x" * (wire.MAX_LINE_BYTES + 2))
    await eventually(lambda: connector.cut, timeout_s=10)


async def test_a_long_line_within_the_limit_is_read(peer: Listening, connector: FakeConnector) -> None:
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    connector.retain(params={"remote_block_ids": [list(range(200_000))]})
    await eventually(lambda: bool(peer.of(ev.Reported)))


async def test_something_that_says_no_hello_is_not_served(peer: Listening) -> None:
    reader, writer = await asyncio.open_unix_connection(str(peer.path))
    writer.write(wire.encode(wire.Freed(set_ids=["set-1"])))
    assert await reader.read() == b""
    assert peer.heard == []
    writer.close()


async def test_another_protocol_version_is_refused(peer: Listening) -> None:
    connector = FakeConnector(peer.path, hello(protocol=wire.PROTOCOL_VERSION + 1))
    await connector.connect()
    await eventually(lambda: connector.cut)
    assert peer.heard == []
    await connector.close()


async def test_a_set_that_cannot_be_managed_is_left_out_of_a_replay_that_still_counts(
    peer: Listening, connector: FakeConnector
) -> None:
    connector.sets["a,b"] = report("a,b", deadline=1e6)
    connector.sets["set-1"] = report("set-1", deadline=1e6)
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    assert [event.block_set.set_id for event in peer.heard if isinstance(event, ev.Reported)] == ["set-1"]


async def test_a_connector_that_answers_no_pings_is_given_up(tmp_path: Path) -> None:
    async with listening(tmp_path / "agent.sock", FastClock()) as peer:
        connector = FakeConnector(peer.path, answers_pings=False)
        await connector.connect()
        await eventually(lambda: connector.cut)
        assert len(peer.of(ev.ConnectorLost)) == 1
        await connector.close()


async def test_a_connector_that_reads_nothing_fails_the_flush_in_time(peer: Listening) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.connect(str(peer.path))
        mute.sendall(wire.encode(hello()))
        await eventually(lambda: bool(peer.of(ev.EngineConnected)))
        for number in range(5_000):
            peer.server.tell("engine-1", wire.Claimed(set_id=f"{number:0256}"))
        began = asyncio.get_running_loop().time()
        assert not await peer.server.flushed("engine-1", 0.02)
        assert asyncio.get_running_loop().time() - began < 5


async def test_a_closed_connection_fails_the_flush(peer: Listening, connector: FakeConnector) -> None:
    assert not await peer.server.flushed("engine-1", 0.02)
    await connector.connect()
    await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
    await connector.close()
    peer.server.tell("engine-1", wire.Claimed(set_id="set-1"))
    assert not await peer.server.flushed("engine-1", 0.02)


async def test_a_stale_socket_of_a_dead_agent_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    async with listening(path) as peer:
        connector = FakeConnector(path)
        await connector.connect()
        await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
        await connector.close()
    assert not path.exists()


async def test_the_newest_agent_takes_the_path_and_keeps_it_when_the_older_one_ends(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    connector = FakeConnector(path)
    async with contextlib.AsyncExitStack() as older_life:
        older = await older_life.enter_async_context(listening(path))
        await connector.connect()
        await eventually(lambda: bool(older.of(ev.ReplayFinished)))
        async with listening(path) as newer:
            assert not connector.cut
            await older_life.aclose()
            await eventually(lambda: connector.cut)
            await connector.close()
            await connector.connect()
            await eventually(lambda: bool(newer.of(ev.ReplayFinished)))
            await connector.close()


@pytest.mark.parametrize("next_one", [True, False], ids=["taken", "removed"])
def test_an_agent_knows_its_own_socket_though_the_path_is_taken_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_one: bool
) -> None:
    path = tmp_path / "connector.sock"
    other = tmp_path / "other.sock"
    rename = Path.rename

    def overtaken(fresh: Path, target: Path) -> None:
        rename(fresh, target)
        if next_one:
            rename(other, target)
        else:
            target.unlink()

    with socket.socket(socket.AF_UNIX) as newer:
        newer.bind(str(other))
        monkeypatch.setattr(Path, "rename", overtaken)
        server = ConnectorServer(path=path, session="session-1", clock=SystemClock())
        server.open()
        server.close()
        assert path.exists() is next_one


async def test_an_agent_that_gives_way_lets_its_connectors_go_to_the_next_one_and_never_takes_the_path_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "agent.sock"
    connector = FakeConnector(path)
    async with listening(path, FastClock()) as older:
        await connector.connect()
        await eventually(lambda: bool(older.of(ev.ReplayFinished)))
        older.server.give_way()
        async with listening(path) as newer:
            await eventually(lambda: connector.cut)
            await connector.close()
            await connector.connect()
            await eventually(lambda: bool(newer.of(ev.ReplayFinished)))
            await connector.close()
        await FastClock().sleep(20)
        assert not path.exists()


async def test_an_agent_takes_the_path_again_when_the_one_that_took_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    async with listening(path, FastClock()) as older:
        async with listening(path):
            pass
        await eventually(path.exists)
        connector = FakeConnector(path)
        await connector.connect()
        await eventually(lambda: bool(older.of(ev.ReplayFinished)))
        await connector.close()
    assert not path.exists()


async def test_a_removed_socket_is_made_again_and_connections_outlive_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "agent.sock"
    async with listening(path) as peer:
        connector = FakeConnector(path)
        await connector.connect()
        await eventually(lambda: bool(peer.of(ev.ReplayFinished)))
        path.unlink()
        path.parent.rmdir()
        await eventually(path.exists, timeout_s=8)
        connector.retain()
        await eventually(lambda: bool(peer.of(ev.Reported)))
        await connector.close()


async def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    path.write_text("precious")
    with pytest.raises(UnavailableError, match="not a socket"):
        ConnectorServer(path=path, session="session-1", clock=SystemClock()).open()
    assert path.read_text() == "precious"
