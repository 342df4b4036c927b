"""How often etcd is asked: once for a lookup, once for up to 100 pointers of a batch, and never for a claim."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.etcd import EtcdClient, EtcdOptions, Get
from tests.contract.owner_node import agent_node
from tests.fakes import samples
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.registry_process import running_registry
from tests.integration.test_agent_registry import found, ready

pytestmark = pytest.mark.etcd

# Asked now and then, whether etcd is there and how it is.
_BACKGROUND = {"Range", "Status"}


def _handled(etcd: EtcdProcess) -> Counter[str]:
    """Returns how many calls of each method etcd has answered."""
    handled: Counter[str] = Counter()
    for line in etcd.metrics():
        if line.startswith("grpc_server_handled_total{"):
            handled[line.partition('grpc_method="')[2].partition('"')[0]] += int(float(line.rpartition(" ")[2]))
    return handled


@contextmanager
def counted(etcd: EtcdProcess) -> Iterator[Counter[str]]:
    """Counts what is done inside, known once left."""
    before, calls = _handled(etcd), Counter[str]()
    yield calls
    calls.update({method: count for method, count in (_handled(etcd) - before).items() if method not in _BACKGROUND})


async def test_a_lookup_is_one_round_trip_for_any_number_of_keys(own_etcd: EtcdProcess, cluster: str) -> None:
    async with running_registry(own_etcd.endpoint, cluster) as registry:
        with counted(own_etcd) as calls:
            for key_count in (1, 2, 16):
                keys = [f"key-{number}" for number in range(key_count)]
                await registry.index.FindBlockSets(pb.FindBlockSetsRequest(scope="s", keys=keys), timeout=5)
    assert calls == {"Txn": 3}


async def test_lookups_that_come_together_share_round_trips(own_etcd: EtcdProcess) -> None:
    async with EtcdClient(EtcdOptions(endpoints=(own_etcd.endpoint,))) as client:
        await client.txn([], [Get(b"k")])
        with counted(own_etcd) as calls:
            await asyncio.gather(*(client.txn([], [Get(b"k"), Get(b"%d" % number)]) for number in range(50)))
    # One that went alone, and 49 that came while it was on its way.
    assert calls == {"Txn": 2}


async def test_a_batch_is_one_round_trip_for_each_100_pointers(own_etcd: EtcdProcess, cluster: str) -> None:
    async with running_registry(own_etcd.endpoint, cluster) as registry:
        call = registry.index.PublishBlockSets()
        await call.write(pb.PublishBlockSetsRequest(open=pb.PublishBlockSetsRequest.Open(node_id="d1", engine_id="e1")))
        await call.read()
        for nonce, (pointer_count, round_trips) in enumerate(((1, 1), (100, 1), (250, 3)), start=1):
            pointers = [samples.pointer(f"{nonce}-{number}") for number in range(pointer_count)]
            batch = pb.PublishBlockSetsRequest.Batch(nonce=nonce, upserts=pointers)
            with counted(own_etcd) as calls:
                await call.write(pb.PublishBlockSetsRequest(batch=batch))
                assert (await call.read()).acknowledged.nonce == nonce
            assert calls == {"Txn": round_trips}
        call.cancel()


async def test_a_claim_is_granted_though_etcd_says_nothing(own_etcd: EtcdProcess, cluster: str, tmp_path: Path) -> None:
    async with (
        running_registry(own_etcd.endpoint, cluster) as registry,
        agent_node(tmp_path, registry.address) as agent,
    ):
        await agent.connector.connect()
        await ready(registry)
        agent.connector.retain()
        await found(registry)
        own_etcd.pause()
        try:
            assert (await agent.claim()).token_count == 100
        finally:
            own_etcd.resume()
