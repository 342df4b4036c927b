"""The node in the directory: what it says, when it is ready, and how it ends."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_common.grpc_client import open_channel
from backhaul_node_agent import instruments
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.node import NO_CONNECTOR, SideChannelFacts
from backhaul_node_agent.service import SERVICE_NAME
from backhaul_registry.core.ledger import MAX_OPS
from tests.contract.owner_node import owner_node, reuses
from tests.fakes.connector import WEIGHTS, FakeConnector, hello
from tests.fakes.eventually import eventually
from tests.fakes.readings import Readings
from tests.fakes.recovery import recovered


async def test_an_engine_without_the_connector_joins_and_says_what_is_missing(tmp_path: Path) -> None:
    async with owner_node(tmp_path, connect=False) as node:
        await eventually(lambda: "node-1" in node.registry.nodes and bool(node.record.engines))
        await eventually(lambda: node.record.state == registry_pb2.NODE_STATE_READY)
        (engine,) = node.record.engines
        assert (engine.reuse, engine.reuse_problem) == (False, NO_CONNECTOR)
        assert (engine.engine_id, engine.compatibility_hash) == ("engine-1", "compatible")
        assert (engine.block_size, engine.block_count, engine.vllm_version) == (32, 1000, "0.32.0")


async def test_a_node_joins_once_its_server_was_asked(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node:
        assert [record.state for record in node.registry.joined] == [registry_pb2.NODE_STATE_READY]


async def test_the_first_record_waits_for_the_connector_and_names_the_weights(tmp_path: Path) -> None:
    async with owner_node(tmp_path, connect=False) as node:
        await eventually(lambda: "/version" in node.http.requests and bool(node.side_channel.asked))
        await asyncio.sleep(0.5)
        await node.connector.connect()
        await node.ready()
        assert [engine.weights_digest for engine in node.registry.joined[0].engines] == [WEIGHTS]


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [({}, 1), ({"advertise_engine_url": "http://10.0.0.7:8200"}, 0)],
    ids=["loopback", "advertised"],
)
async def test_an_engine_url_that_routers_cannot_use_is_warned_of_at_start(
    tmp_path: Path, settings: dict[str, str], warnings: int
) -> None:
    with capture_logs() as logs:
        async with owner_node(tmp_path, connect=False, advertise="10.0.0.7:7201", **settings) as node:
            await node.connector.connect()
            await eventually(lambda: "node-1" in node.registry.nodes)
            assert node.record.engine_url == settings.get("advertise_engine_url", node.http.url)
    assert [log["event"] for log in logs].count("engine not reachable from elsewhere") == warnings


@pytest.mark.parametrize(
    "changes",
    [
        {"block_count": 2**40},
        {"ttl_s": 1e300},
        {"weights_digest": "z" * 5_000},
        {"rank": -1},
        {"engine_id": ""},
    ],
    ids=lambda changes: "-".join(changes),
)
async def test_a_hello_that_no_engine_says_neither_ends_the_agent_nor_takes_the_node_out(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async with owner_node(tmp_path) as node:
        odd = FakeConnector(node.config.socket_path, hello(**{"engine_id": "engine-9", "rank": 7, **changes}))
        await odd.connect()
        await eventually(lambda: odd.cut)
        await odd.close()
        node.connector.retain()
        await node.published()
        await node.claim()
        assert not node.running.done()
        assert [engine.engine_id for engine in node.record.engines] == ["engine-1"]


async def test_an_engine_that_keeps_blocks_too_shortly_to_renew_them_is_warned_of_once(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with owner_node(tmp_path) as node:
            other = FakeConnector(node.config.socket_path, hello(engine_id="engine-2", rank=1, ttl_s=5.0))
            for _ in range(2):
                await other.connect()
                await eventually(lambda: len(node.record.engines) == 2)
                await other.close()
    told = [log["problem"] for log in logs if log["event"] == "block sets cannot be kept"]
    assert len(told) == 1
    assert told[0].startswith("decoder_kv_blocks_ttl is 5 s")


async def test_what_the_side_channel_said_of_a_rank_that_has_gone_is_not_listed(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node:
        node.app._on_engine(1, SideChannelFacts("engine-9", "compatible", 32, 1000))
        other = FakeConnector(node.config.socket_path, hello(engine_id="engine-2", rank=1))
        await other.connect()
        await eventually(lambda: len(node.record.engines) == 2)
        await other.close()
        node.app._agent.hear(ev.EngineGone("engine-2"))
        await node.ready()
        await eventually(lambda: [engine.engine_id for engine in node.record.engines] == ["engine-1"])


async def test_a_server_of_one_rank_lists_its_own_engine_and_not_the_one_that_listens_beside_it(tmp_path: Path) -> None:
    async with owner_node(tmp_path, connect=False) as node:
        # What listens at the side channel's first port is another server's rank 0.
        node.http.metrics = 'vllm:num_requests_running{engine="1",model_name="model-1"} 0.0\n'
        own = FakeConnector(node.config.socket_path, hello(engine_id="engine-2", rank=1))
        await own.connect()
        await node.ready()
        await eventually(lambda: [(e.engine_id, e.rank) for e in node.record.engines] == [("engine-2", 0)])
        await own.close()


async def test_a_rank_without_the_connector_is_listed_beside_those_that_have_it(tmp_path: Path) -> None:
    async with owner_node(tmp_path, connect=False) as node:
        node.http.metrics = "".join(f'vllm:num_requests_running{{engine="{n}",model_name="m"}} 0.0\n' for n in (0, 1))
        other = FakeConnector(node.config.socket_path, hello(engine_id="engine-2", rank=1))
        await other.connect()
        await eventually(lambda: "node-1" in node.registry.nodes)
        await eventually(
            lambda: (
                [(e.engine_id, e.rank, e.reuse) for e in node.record.engines]
                == [("engine-1", 0, False), ("engine-2", 1, True)]
            )
        )
        await other.close()


async def test_a_record_that_the_registry_refuses_says_so_and_the_node_is_back_once_the_cause_has_gone(
    tmp_path: Path,
) -> None:
    async with owner_node(tmp_path) as node:
        node.connector.retain()
        await node.published()
        node.registry.refused_engine = "engine-7"
        odd = FakeConnector(node.config.socket_path, hello(engine_id="engine-7", rank=7))
        with capture_logs() as logs:
            await odd.connect()
            await eventually(lambda: node.record.state == registry_pb2.NODE_STATE_NOT_READY)
            joins = len(node.registry.joined)
            await asyncio.sleep(1)
        assert node.record.state_reason == "the registry refuses the node's record: an engine that is not liked"
        assert [log["reason"] for log in logs if log["log_level"] == "error"] == ["NODE_INVALID"]
        assert len(node.registry.joined) <= joins + 1
        await node.claim()

        await odd.close()
        other = FakeConnector(node.config.socket_path, hello(engine_id="engine-8", rank=7))
        await other.connect()
        await node.ready()
        assert [engine.engine_id for engine in node.record.engines] == ["engine-1", "engine-8"]
        await other.close()


async def test_a_node_whose_record_is_too_long_is_listed_with_what_there_is_room_for(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node:
        node.http.models += [f"{number:04}-{'x' * 900}" for number in range(256)]
        await eventually(lambda: len(node.record.models) > 1, 10)
        assert node.record.state == registry_pb2.NODE_STATE_READY
        assert list(node.record.models) == node.http.models[: len(node.record.models)]


async def test_a_node_that_is_not_ready_keeps_its_sets(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node:
        node.connector.retain()
        await node.published()
        node.http.healthy = False
        await eventually(lambda: node.record.state == registry_pb2.NODE_STATE_NOT_READY)
        assert node.registry.keys_of("set-1")
        node.http.healthy = True
        await eventually(lambda: node.record.state == registry_pb2.NODE_STATE_READY)
        await node.claim()


async def test_pointers_of_a_restarted_engine_are_gone_before_the_node_is_ready_again(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node:
        node.connector.retain()
        await node.published()
        await node.connector.close()
        node.side_channel.engine_id = "engine-2"
        node.registry.answering.clear()
        restarted = FakeConnector(node.config.socket_path, hello(engine_id="engine-2"))
        await restarted.connect()
        await eventually(lambda: node.app.engine_ids == ["engine-2"])
        assert node.app.readiness_reason == "pointers of the engine's previous incarnation are being removed"

        node.registry.answering.set()

        await eventually(lambda: reuses(node.record) and node.record.engines[0].engine_id == "engine-2")
        assert node.registry.ended_engines == ["engine-1"]
        assert not node.registry.keys_of("set-1")
        assert await node.refusal() == "SET_UNKNOWN"
        await restarted.close()


async def test_an_engine_that_restarted_in_a_blink_is_known_at_its_hello(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node:
        node.connector.retain()
        await node.published()

        async def known() -> bool:
            engines = [engine.engine_id for engine in node.record.engines]
            return engines == ["engine-2"] and not node.registry.keys_of("set-1")

        # Health and side channel answer all the time, as after a restart between two looks at them.
        restarted = FakeConnector(node.config.socket_path, hello(engine_id="engine-2"))
        await restarted.connect()
        await recovered("engine restarted: known", known, within_s=2)
        assert await node.refusal(engine_id="engine-1") == "SET_UNKNOWN"
        await restarted.close()


async def test_a_node_whose_engine_is_stuck_says_so_keeps_its_sets_and_comes_back(tmp_path: Path) -> None:
    async with owner_node(tmp_path, stall_s=1) as node:
        node.connector.retain()
        await node.published()
        labels = '{engine="0",model_name="model-1"}'
        node.http.metrics = f"vllm:num_requests_waiting{labels} 3.0\nvllm:generation_tokens_total{labels} 7.0\n"
        await eventually(lambda: node.record.state == registry_pb2.NODE_STATE_NOT_READY, 10)
        assert node.record.state_reason == "the engine of rank 0 has requests and made no progress for 1 s"
        assert node.registry.keys_of("set-1")
        node.http.metrics = node.http.metrics.replace("7.0", "8.0").replace("3.0", "0.0")
        await node.ready()
        await node.claim()


async def test_health_follows_the_agents_life(tmp_path: Path) -> None:
    async with owner_node(tmp_path, drain_s=0.5) as node, open_channel(f"127.0.0.1:{node.app.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=10) for name in ("", SERVICE_NAME)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(node.stop())
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"problem": "bidirectional_kv_xfer is off"}, "bidirectional_kv_xfer is off"),
        ({"weights_digest": ""}, "the weights digest is not known yet"),
        ({"side_channel_host": "localhost"}, "VLLM_NIXL_SIDE_CHANNEL_HOST"),
        ({"side_channel_host": "0.0.0.0"}, "VLLM_NIXL_SIDE_CHANNEL_HOST"),
    ],
    ids=["connector-says-so", "no-digest", "loopback", "wildcard"],
)
async def test_an_engine_that_cannot_reuse_blocks_says_why(
    tmp_path: Path, changes: dict[str, str], problem: str
) -> None:
    async with owner_node(tmp_path, connect=False, advertise="10.0.0.7:7201") as node:
        node.connector.greeting = msgspec.structs.replace(
            node.connector.greeting, **{"side_channel_host": "10.0.0.7", **changes}
        )
        await node.connector.connect()
        await eventually(lambda: "node-1" in node.registry.nodes and bool(node.record.engines))
        await eventually(lambda: problem in node.record.engines[0].reuse_problem)


async def test_an_agent_that_is_told_to_end_says_so_removes_its_pointers_and_leaves(tmp_path: Path) -> None:
    async with owner_node(tmp_path, drain_s=0.2) as node:
        node.connector.retain()
        await node.published()
        began = asyncio.get_running_loop().time()
        await node.stop()
        assert asyncio.get_running_loop().time() - began < 2
        assert node.registry.pointers == {}
        assert node.registry.nodes == {}
        assert node.registry.left_count == 1
        assert not node.config.socket_path.exists()


async def test_an_agent_ends_in_time_when_the_registry_is_silent(tmp_path: Path) -> None:
    async with owner_node(tmp_path, drain_s=0.2) as node:
        node.connector.retain()
        await node.published()
        node.registry.answering.clear()
        began = asyncio.get_running_loop().time()
        await node.stop()
        assert asyncio.get_running_loop().time() - began < 5
        node.registry.answering.set()


async def test_pointers_are_published_again_after_a_broken_stream(read: Readings, tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node:
        node.connector.retain("set-1")
        await node.published("set-1")
        assert read.counted(instruments.PUBLISH_BREAKS) == {}
        node.registry.break_publishing()
        node.registry.pointers.clear()
        await node.published("set-1")
        assert read.of(instruments.PUBLISH_BREAKS)[()] >= 1


async def test_a_removal_that_was_never_acknowledged_is_sent_again(tmp_path: Path) -> None:
    async with owner_node(tmp_path) as node:
        node.connector.retain("set-1")
        await node.published("set-1")
        node.registry.acknowledging.clear()
        node.connector.free("set-1")
        await node.unpublished("set-1")
        before = len(node.registry.batches)

        def sent_again() -> bool:
            later = node.registry.batches[before:]
            return any(pointer.set_id == "set-1" for batch in later for pointer in batch.removals)

        # The agent gives the stream up, opens another one and begins anew.
        await eventually(sent_again, timeout_s=10)
        node.registry.acknowledging.set()


async def test_what_comes_while_a_batch_of_pointers_is_on_its_way_goes_together(tmp_path: Path) -> None:
    later = {"set-1", "set-2", "set-3"}
    async with owner_node(tmp_path) as node:
        node.registry.acknowledging.clear()
        node.connector.retain("set-0")
        await node.published("set-0")
        for set_id in sorted(later):
            node.connector.retain(set_id)
            await node.becomes(agent_pb2.BLOCK_SET_STATE_HELD, set_id)
        node.registry.acknowledging.set()
        await node.published("set-3")
        batches = [{pointer.set_id for pointer in batch.upserts} for batch in node.registry.batches]
        assert any(later <= batch for batch in batches)


async def test_a_batch_is_no_more_than_one_transaction_of_the_registry(tmp_path: Path) -> None:
    """Else an etcd that is slow never has time for the first one, and all begins anew without end."""
    async with owner_node(tmp_path) as node:
        set_ids = [f"set-{number}" for number in range(2 * MAX_OPS)]
        for set_id in set_ids:
            node.connector.retain(set_id)
        for set_id in set_ids:
            await node.published(set_id)
        before = len(node.registry.batches)
        node.registry.break_publishing()
        await eventually(lambda: sum(len(batch.upserts) for batch in node.registry.batches[before:]) >= len(set_ids))
        assert max(len(batch.upserts) for batch in node.registry.batches[before:]) == MAX_OPS


async def test_the_lease_is_kept_alive_by_a_third_of_its_time(tmp_path: Path) -> None:
    async with owner_node(tmp_path, lease_ttl_s=2, lease_margin_s=0.2) as node:
        before = node.registry.keep_alive_count
        await asyncio.sleep(2.2)
        assert node.registry.keep_alive_count - before >= 3


async def test_a_lost_lease_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    async with owner_node(tmp_path, lease_ttl_s=2, lease_margin_s=0.2) as node:
        node.connector.retain()
        await node.published()
        node.registry.lose_lease()
        await eventually(lambda: len(node.registry.joined) > 1 and "node-1" in node.registry.nodes)
        await node.published()
        await node.claim()


async def test_the_process_ends_with_0_on_sigterm_and_2_on_bad_configuration(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "backhaul_node_agent"]
    bad = await asyncio.create_subprocess_exec(*command, "--role", "both", stderr=asyncio.subprocess.PIPE)
    _, stderr = await bad.communicate()
    assert bad.returncode == 2
    assert stderr.startswith(b"backhaul-node-agent: --role: ")

    flags = ["--listen", "127.0.0.1:0", "--registry", "127.0.0.1:9", "--connector-socket", str(tmp_path / "a.sock")]
    agent = await asyncio.create_subprocess_exec(*command, *flags, stderr=asyncio.subprocess.DEVNULL)
    await eventually(lambda: (tmp_path / "a.sock").exists(), timeout_s=20)
    agent.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(agent.wait(), 15) == 0
    assert not (tmp_path / "a.sock").exists()
