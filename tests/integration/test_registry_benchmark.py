"""The benchmark of the registry compares like with like: its callers are served by both, at the same cost in etcd."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from backhaul_local.ports import Ports
from backhaul_local.processes import Supervisor
from benchmarks.registry import bare, callers
from benchmarks.registry.filled import fill, size_of, write
from benchmarks.registry.pointers import CLUSTER
from benchmarks.registry.report import MOST_BYTES
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.registry_process import running_registry
from tests.integration.test_etcd_round_trips import counted

pytestmark = pytest.mark.etcd

POINTERS = 100


@asynccontextmanager
async def served(arm: str, endpoint: str) -> AsyncIterator[str]:
    if arm == "registry":
        async with running_registry(endpoint, CLUSTER) as registry:
            yield registry.address
        return
    async with grpc.aio.insecure_channel(endpoint) as etcd:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(bare.handlers(etcd))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(0)


@pytest.mark.parametrize("arm", ["registry", "bare"])
async def test_both_arms_serve_the_callers_with_as_many_transactions(own_etcd: EtcdProcess, arm: str) -> None:
    await write(own_etcd.endpoint, POINTERS)
    async with served(arm, own_etcd.endpoint) as address:
        async with callers.finders([address], 1, POINTERS) as (find,):
            with counted(own_etcd) as calls:
                for _ in range(5):
                    await find()
            assert calls == {"Txn": 5}
        async with callers.publishers([address], 1, 100) as (publish,):
            with counted(own_etcd) as calls:
                for _ in range(2):
                    await publish()
            assert calls == {"Txn": 2}


def test_a_pointer_takes_no_more_room_than_it_may(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs") as supervisor:
        filled = fill("etcd", 10_000, supervisor=supervisor, ports=Ports(), data=tmp_path, traced=True)
        # A database of so few has some room that it does not need.
        assert size_of(filled).database_bytes < 1.05 * MOST_BYTES
