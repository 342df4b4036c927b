"""A router's reports of engines' load, from real agents and from such as fail to tell."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from socket import socket
from types import TracebackType
from typing import Any, Self

import grpc
import pytest
from structlog.testing import capture_logs

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_common.clock import Clock, SystemClock
from backhaul_common.grpc_server import GrpcServer
from backhaul_connector import wire
from backhaul_router import load_reports
from backhaul_router.core.nodes import Node, NodeState, NodeTable, Role
from backhaul_router.core.routing.reports import EngineReport, Reports, Retention
from backhaul_router.load_reports import LoadReports
from tests.contract.owner_node import owner_node
from tests.contract.test_owner_load import metrics
from tests.fakes.clock import FakeClock
from tests.fakes.connector import FakeConnector, hello
from tests.fakes.eventually import eventually
from tests.fakes.side_channel import FakeSideChannel
from tests.fakes.vllm_http import FakeVllmHttp

KEY = ("node-1", "engine-1")


class Followed:
    """A node table, and the reports of its nodes."""

    def __init__(self, clock: Clock) -> None:
        self.table = NodeTable()
        self.reports = Reports(clock.monotonic)
        self.follower = LoadReports(self.table, self.reports, clock)

    def list(self, *nodes: Node) -> None:
        """Lets these be all nodes."""
        self.table.replace(nodes)

    def running(self, engine_id: str = "engine-1", node_id: str = "node-1") -> int | None:
        """Returns how many requests run on an engine; None when that is unknown."""
        report = self.reports.of((node_id, engine_id))
        return report.running if report else None


def node(address: str, node_id: str = "node-1", session: str = "1") -> Node:
    """Returns a node whose agent is there."""
    url = f"http://{node_id}:8200"
    return Node(node_id, Role.DECODE, address, url, frozenset(), (), NodeState.READY, session=session)


@asynccontextmanager
async def following(clock: Clock | None = None) -> AsyncIterator[Followed]:
    """Follows what the nodes' agents tell."""
    followed = Followed(clock or SystemClock())
    running = asyncio.create_task(followed.follower.run())
    try:
        yield followed
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_reports_follow_two_ranks_and_an_engine_that_starts_anew(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as agent, following() as followed:
        followed.list(node(f"127.0.0.1:{agent.app.port}"))
        other = FakeConnector(agent.config.socket_path, hello(engine_id="engine-2", rank=1))
        await other.connect()
        other.send(wire.Memory(free_count=700, waiting_count=0))
        agent.http.metrics = metrics(r0=3, r1=5)
        await eventually(lambda: (followed.running(), followed.running("engine-2")) == (3, 5))
        held = Retention(sets=0, blocks=0, block_limit=500)
        assert followed.reports.of(KEY) == EngineReport(running=3, waiting=6, kv_usage=0.25, retention=held)
        assert followed.reports.of(("node-1", "engine-2")) == EngineReport(5, 10, 0.25, 700, held)

        agent.http.metrics = metrics(r0=3, r1=6)
        await eventually(lambda: followed.running("engine-2") == 6)
        assert followed.running() == 3

        await other.close()
        again = FakeConnector(agent.config.socket_path, hello(engine_id="engine-3", rank=1))
        await again.connect()
        await eventually(lambda: followed.running("engine-3") == 6)
        assert followed.running("engine-2") is None
        await again.close()


@contextmanager
def agent_process(port: int, tmp_path: Path, http: FakeVllmHttp, side: FakeSideChannel) -> Iterator[Any]:
    """Runs an agent that can be killed."""
    command = [sys.executable, "-m", "backhaul_node_agent", "--listen", f"127.0.0.1:{port}"]
    command += ["--registry", "127.0.0.1:1", "--engine-url", http.url, "--side-channel", f"127.0.0.1:{side.port}"]
    command += ["--connector-socket", str(tmp_path / "c.sock")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_reports_of_an_agent_that_is_killed_grow_old_and_come_back_with_it(tmp_path: Path) -> None:
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with FakeSideChannel() as side:
        async with FakeVllmHttp() as http, following() as followed:
            http.metrics = metrics(r0=3)
            followed.list(node(f"127.0.0.1:{port}"))
            with agent_process(port, tmp_path, http, side) as process:
                await eventually(lambda: followed.running() == 3, 60)
                process.kill()
                await eventually(lambda: followed.running() is None, 30)
            http.metrics = metrics(r0=4)
            with agent_process(port, tmp_path, http, side):
                await eventually(lambda: followed.running() == 4, 60)


class FakeAgent:
    """Tells what the test says, to whoever watches."""

    def __init__(self) -> None:
        self.watch_count = 0
        self.open_count = 0
        self.silent = False
        """Whether nothing follows the first message."""
        self._server = GrpcServer(address="127.0.0.1:0", service_names=[])
        servicer: Any = self
        agent_pb2_grpc.add_LoadServiceServicer_to_server(servicer, self._server.server)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.__aexit__(kind, error, trace)

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self._server.port}"

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[agent_pb2.WatchLoadResponse]:
        self.watch_count += 1
        self.open_count += 1
        try:
            while True:
                yield agent_pb2.WatchLoadResponse(
                    engines=[agent_pb2.EngineLoad(engine_id="engine-1", running_count=self.watch_count)]
                )
                await asyncio.sleep(3600 if self.silent else 0.05)
        finally:
            self.open_count -= 1


class OldAgent(FakeAgent):
    """Does not know how to tell, and counts who asks."""

    async def WatchLoad(self, request: Any, context: Any) -> Any:
        self.watch_count += 1
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "WatchLoad")
        yield


@pytest.fixture
async def agent(no_leaks: None) -> AsyncIterator[FakeAgent]:
    async with FakeAgent() as agent:
        yield agent


async def test_a_node_that_leaves_is_forgotten_with_its_stream(agent: FakeAgent) -> None:
    async with following() as followed:
        followed.list(node(agent.address), node(agent.address, "node-2"))
        await eventually(lambda: followed.running() is not None and followed.running(node_id="node-2") is not None)
        followed.list(node(agent.address, "node-2"))
        await eventually(lambda: agent.open_count == 1)
        assert followed.running() is None
        assert followed.running(node_id="node-2") is not None


async def test_an_agent_that_moved_or_started_anew_is_asked_where_it_is_now(agent: FakeAgent) -> None:
    async with FakeAgent() as other, following() as followed:
        followed.list(node(agent.address))
        await eventually(lambda: agent.open_count == 1)
        followed.list(node(agent.address, session="2"))
        await eventually(lambda: (agent.watch_count, agent.open_count) == (2, 1))
        followed.list(replace(node(agent.address, session="2"), state=NodeState.DRAINING))
        followed.list(node(other.address, session="2"))
        await eventually(lambda: (agent.open_count, other.open_count) == (0, 1))
        assert agent.watch_count == 2


async def test_an_agent_that_falls_silent_is_asked_again(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_reports, "SILENCE_S", 0.5)
    agent.silent = True
    with capture_logs() as logs:
        async with following() as followed:
            followed.list(node(agent.address))
            await eventually(lambda: followed.running() == 2, 15)
    assert [entry["event"] for entry in logs][:2] == ["load reports missing", "load reports restored"]


async def test_an_agent_that_is_away_is_asked_again_and_again_and_logged_once() -> None:
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        clock = FakeClock()
        with capture_logs() as logs:
            async with following(clock) as followed:
                followed.list(node(address))
                for _ in range(20):
                    await clock.advance(2)
                    await asyncio.sleep(0.05)
        assert [entry["event"] for entry in logs] == ["load reports missing"]


async def test_an_agent_that_cannot_tell_is_asked_again_after_a_minute_or_when_it_starts_anew(no_leaks: None) -> None:
    clock = FakeClock()
    async with OldAgent() as agent, following(clock) as followed:
        with capture_logs() as logs:
            followed.list(node(agent.address))
            await clock.advance(0.25)
            await eventually(lambda: bool(logs))
        assert "too old" in logs[0]["reason"]
        await clock.advance(59)
        await asyncio.sleep(0.2)
        assert agent.watch_count == 1
        await clock.advance(2)
        await eventually(lambda: agent.watch_count == 2)
        followed.list(node(agent.address, session="2"))
        await clock.advance(0.25)
        await eventually(lambda: agent.watch_count == 3)
        assert followed.running() is None
