"""What an agent tells of its engines' load."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_common.errors import UnavailableError
from backhaul_common.grpc_client import open_channel
from backhaul_connector import wire
from tests.contract.owner_node import OwnerNode, owner_node
from tests.fakes.connector import FakeConnector, hello
from tests.fakes.streams import Watching

Engines = dict[str, agent_pb2.EngineLoad]


def metrics(**running: int) -> str:
    """Returns what a server's /metrics says that has so many requests on each rank, and twice as many waiting."""
    lines = []
    for rank, count in running.items():
        labels = f'{{engine="{rank[1:]}",model_name="model-1"}}'
        lines.append(f"vllm:num_requests_running{labels} {count}.0")
        lines.append(f"vllm:num_requests_waiting{labels} {2 * count}.0")
        lines.append(f"vllm:kv_cache_usage_perc{labels} 0.25")
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def watching(node: OwnerNode) -> AsyncIterator[Watching]:
    """Watches a node's load."""
    async with open_channel(f"127.0.0.1:{node.app.port}") as channel:
        call = agent_pb2_grpc.LoadServiceStub(channel).WatchLoad(agent_pb2.WatchLoadRequest())
        async with Watching(call) as watch:
            yield watch


async def until(watch: Watching, holds: Callable[[Engines], bool]) -> Engines:
    """Returns the engines of the first message for which ``holds``."""
    while not holds(engines := {engine.engine_id: engine for engine in (await watch.read()).engines}):
        pass
    return engines


async def test_the_figures_of_two_ranks_are_told_apart_as_they_change(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node, watching(node) as watch:
        other = FakeConnector(node.config.socket_path, hello(engine_id="engine-2", rank=1))
        await other.connect()
        node.http.metrics = metrics(r0=3, r1=5)
        engines = await until(watch, lambda engines: len(engines) == 2)
        shown = {key: (one.running_count, one.waiting_count, one.kv_usage) for key, one in engines.items()}
        assert shown == {"engine-1": (3, 6, 0.25), "engine-2": (5, 10, 0.25)}
        assert not any(one.HasField("free_block_count") for one in engines.values())

        node.http.metrics = metrics(r0=3, r1=0)
        other.send(wire.Memory(free_count=700, waiting_count=0))
        engines = await until(watch, lambda engines: engines["engine-2"].HasField("free_block_count"))
        assert engines["engine-2"].free_block_count == 700
        await until(watch, lambda engines: engines["engine-2"].running_count == 0)
        await other.close()
        engines = await until(watch, lambda engines: not engines["engine-2"].HasField("free_block_count"))
        assert engines["engine-1"].running_count == 3


async def test_what_finished_turns_hold_is_told_with_how_much_they_may(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node, watching(node) as watch:
        node.http.metrics = metrics(r0=0)
        node.connector.retain()
        engines = await until(watch, lambda engines: bool(engines) and engines["engine-1"].retention.set_count == 1)
        held = engines["engine-1"].retention
        assert 0 < held.block_count < held.block_limit
        await node.connector.close()
        await until(watch, lambda engines: bool(engines) and not engines["engine-1"].HasField("retention"))


async def test_an_engine_that_starts_anew_is_not_told_with_the_figures_of_the_one_before(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node, watching(node) as watch:
        node.http.metrics = metrics(r0=9)
        await until(watch, lambda engines: "engine-1" in engines)
        node.http.metrics = metrics(r0=0)
        await node.connector.close()
        node.side_channel.engine_id = "engine-2"
        again = FakeConnector(node.config.socket_path, hello(engine_id="engine-2"))
        await again.connect()
        engines = await until(watch, lambda engines: "engine-2" in engines)
        assert [*engines] == ["engine-2"]
        assert engines["engine-2"].running_count == 0
        await again.close()


async def test_a_server_that_shows_nothing_any_more_has_no_load_that_is_known(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node, watching(node) as watch:
        node.http.metrics = metrics(r0=9)
        await until(watch, lambda engines: "engine-1" in engines)
        node.http.metrics = ""
        await until(watch, lambda engines: not engines)


async def test_a_watch_shows_signs_of_life_when_nothing_changes(tmp_path: Path) -> None:
    async with owner_node(tmp_path, connect=False) as node, watching(node) as watch:
        began = time.monotonic()
        for _ in range(3):
            assert not (await watch.read()).engines
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("drain_s", [0.3, 60])
async def test_watches_end_as_the_agent_is_asked_to_end_and_a_drain_goes_on_as_long_as_it_must(
    tmp_path: Path, drain_s: float
) -> None:
    async with owner_node(tmp_path, drain_s=drain_s) as node, watching(node) as watch, watching(node) as unread:
        node.http.metrics = metrics(r0=1)
        await until(watch, lambda engines: "engine-1" in engines)
        await unread.read()
        began = time.monotonic()
        stopping = asyncio.create_task(node.stop())
        error = await watch.failure()
        assert isinstance(error, UnavailableError)
        assert error.reason == "SHUTTING_DOWN"
        assert time.monotonic() - began < 5
        if drain_s == 60:
            async with watching(node) as late:
                assert (await late.failure()).reason == "SHUTTING_DOWN"
            assert not stopping.done()
            node.http.metrics = metrics(r0=0)
        await asyncio.wait_for(stopping, 30)
