"""A node that an operator drains, or whose agent is asked to end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.grpc_client import to_error
from backhaul_node_agent.publisher import Publisher
from tests.contract.owner_node import OwnerNode, owner_node
from tests.fakes.eventually import eventually


def running(count: int) -> str:
    """Returns what a server's /metrics says that has so many requests."""
    return f'vllm:num_requests_running{{engine="0",model_name="model-1"}} {count}.0\n'


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[OwnerNode]:
    async with owner_node(tmp_path, claim_ttl_s=20) as node:
        yield node


async def drain(node: OwnerNode, timeout_s: float | None = None) -> agent_pb2.DrainResponse:
    """Asks for a drain. Raises BackhaulError."""
    timeout = None if timeout_s is None else Duration(seconds=int(timeout_s), nanos=round(timeout_s % 1 * 1e9))
    try:
        response: agent_pb2.DrainResponse = await node.stub.Drain(agent_pb2.DrainRequest(timeout=timeout), timeout=5)
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    return response


async def left(node: OwnerNode, timeout_s: float = 15.0) -> None:
    """Waits until an operator is told that the node has left."""

    async def holds() -> bool:
        return (await drain(node)).phase == agent_pb2.DRAIN_PHASE_LEFT

    await eventually(holds, timeout_s)


async def shows(node: OwnerNode, count: int) -> None:
    """Lets the server have so many requests; waits until the agent knows, or may know."""
    node.http.metrics = running(count)
    asked = node.http.requests.count("/health") + 2
    await eventually(lambda: node.http.requests.count("/health") >= asked, 10)


async def test_a_node_leaves_when_what_runs_has_ended_and_answers_on(node: OwnerNode) -> None:
    await shows(node, 1)
    answer = await drain(node)
    assert (answer.phase, answer.running_count) == (agent_pb2.DRAIN_PHASE_DRAINING, 1)
    assert 590 < answer.remaining_time.seconds <= 600
    reason = "draining: 1 request runs, 0 block sets are held, leaves in 600 s at the latest"
    await eventually(lambda: node.record.state_reason == reason)
    assert node.record.retiring

    await shows(node, 1)
    await shows(node, 1)
    assert node.record.state == registry_pb2.NODE_STATE_DRAINING
    node.http.metrics = running(0)

    await left(node)
    assert node.registry.nodes == {}
    answer = await drain(node)
    assert (answer.remaining_count, answer.running_count, answer.remaining_time.ToSeconds()) == (0, 0, 0)
    assert await node.refusal() in ("DRAINING", "LEASE_INVALID")
    await shows(node, 0)
    assert node.registry.nodes == {}


async def test_a_claimed_set_is_waited_for_until_it_is_read(node: OwnerNode) -> None:
    await shows(node, 0)
    node.connector.retain()
    await node.published()
    await node.claim()
    assert (await drain(node)).remaining_count == 1
    await shows(node, 0)
    await shows(node, 0)
    assert node.record.state == registry_pb2.NODE_STATE_DRAINING
    node.connector.free("set-1")
    await left(node)


async def test_a_drain_removes_all_pointers_however_many(node: OwnerNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "MAX_REMOVALS", 2)
    set_ids = [f"set-{number}" for number in range(5)]
    for set_id in set_ids:
        node.connector.retain(set_id)
    for set_id in set_ids:
        await node.published(set_id)
    await drain(node, 60.0)
    for set_id in set_ids:
        await node.unpublished(set_id)


async def test_the_deadline_ends_a_drain_whatever_runs(node: OwnerNode) -> None:
    await shows(node, 1)
    await drain(node, 60)
    assert (await drain(node, 600)).remaining_time.ToSeconds() < 61
    await drain(node, 0.5)
    await left(node)
    assert node.registry.nodes == {}


async def test_a_server_that_shows_no_figures_is_waited_for_until_the_deadline(node: OwnerNode) -> None:
    await drain(node, 2)
    await eventually(lambda: node.record.state_reason.startswith("draining: the engine does not say what runs"))
    await left(node)


async def test_where_nobody_listens_nothing_runs(node: OwnerNode) -> None:
    await node.http.__aexit__(None, None, None)
    await drain(node)
    await left(node)


@pytest.mark.parametrize("refused", [Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=86_401)])
async def test_a_timeout_that_makes_no_sense_is_refused(node: OwnerNode, refused: Duration) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.stub.Drain(agent_pb2.DrainRequest(timeout=refused), timeout=5)
    assert isinstance(to_error(caught.value), InvalidArgumentError)
    assert node.record.state == registry_pb2.NODE_STATE_READY


async def test_an_agent_that_is_asked_to_end_waits_for_what_runs_and_its_engine_does_not_retire(
    tmp_path: Path,
) -> None:
    async with owner_node(tmp_path, drain_s=60) as node:
        await shows(node, 1)
        stopping = asyncio.create_task(node.stop())
        await eventually(lambda: node.record.state == registry_pb2.NODE_STATE_DRAINING)
        assert not node.record.retiring
        await shows(node, 1)
        assert not stopping.done()
        node.http.metrics = running(0)
        await asyncio.wait_for(stopping, 30)
        assert node.registry.nodes == {}


async def test_a_drained_node_that_no_registry_answers_has_left_when_its_lease_has_ended(tmp_path: Path) -> None:
    async with owner_node(tmp_path, lease_ttl_s=2, lease_margin_s=0.2) as node:
        node.registry.answering.clear()
        assert (await drain(node, 0)).phase == agent_pb2.DRAIN_PHASE_DRAINING
        await left(node)
        node.registry.answering.set()


async def test_the_engine_of_a_node_that_has_left_may_have_another_agent(node: OwnerNode, tmp_path: Path) -> None:
    await drain(node, 0.1)
    await left(node)
    assert not node.connector.cut
    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), tmp_path / "next.sock"):
        (tmp_path / "next.sock").rename(node.connector.path)
        await eventually(lambda: node.connector.cut, 10)
