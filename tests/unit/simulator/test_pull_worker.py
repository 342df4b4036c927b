"""The worker side of the stand-in connector against a peer that is only a side channel and a notification agent."""

from collections.abc import Iterator

import msgspec
import pytest

from backhaul_simulator.connector_base import EngineMemory, HeartbeatInfo, NixlConnectorMetadata
from backhaul_simulator.notifications import nixl_agent
from backhaul_simulator.options import EngineOptions
from backhaul_simulator.pool import BlockPool
from backhaul_simulator.pull_worker import PullConnectorWorker
from backhaul_simulator.side_channel import HandshakeListener, NixlAgentMetadata, NixlHandshakePayload
from backhaul_simulator.vllm_config import config_of
from tests.fakes.etcd_process import free_port
from tests.fakes.eventually import eventually


@pytest.fixture
def worker() -> Iterator[PullConnectorWorker]:
    """The worker of a decode engine."""
    made = PullConnectorWorker(config_of(EngineOptions(connector=False), rank=0, engine_id="decode"), "decode")
    yield made
    made.shutdown()


def _memory() -> EngineMemory:
    return EngineMemory(
        pool=BlockPool(block_count=8, block_size=32),
        transfer_port=1,
        wake=lambda: None,
        kind_of=lambda _: "handoff",
        pause_of=lambda _: 0.0,
        read_complete=lambda _: None,
    )


async def test_a_heartbeat_reaches_its_engine_once_hands_were_shaken(worker: PullConnectorWorker) -> None:
    own = worker.register_kv_caches(_memory())
    peer, port = nixl_agent("prefill-agent"), free_port()
    metadata = NixlAgentMetadata("prefill", peer.get_agent_metadata(), num_blocks=8, block_size=32, transfer_port=1)
    payload = NixlHandshakePayload(own.compatibility_hash, msgspec.msgpack.encode(metadata))
    listener = HandshakeListener("127.0.0.1", port, payload)
    step = NixlConnectorMetadata()
    step.heartbeat_by_engine = {"prefill": HeartbeatInfo({"theirs"}, "127.0.0.1", port, 1)}
    heard: list[bytes] = []

    def beaten() -> bool:
        worker.start_load_kv(step)
        heard.extend(message for messages in peer.get_new_notifs().values() for message in messages)
        return bool(heard)

    try:
        await eventually(beaten)
        assert set(heard) == {b"HB:theirs"}
    finally:
        listener.stop()
        peer.close()
