"""Channels between services: how soon they are back, and that they belong to the loop that made them."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul.registry.v1.registry_pb2_grpc import NodeServiceStub
from backhaul_common.etcd import EtcdClient, EtcdOptions, Get
from backhaul_common.grpc_client import open_channel
from tests.fakes.etcd_process import EtcdProcess, free_port
from tests.fakes.recovery import recovered
from tests.fakes.registry_process import running_registry

pytestmark = pytest.mark.etcd

_AWAY_S = 7.0
"""Long enough for gRPC's own back-off to have grown to pauses of 4 s and more."""


async def test_a_registry_that_was_away_for_long_is_found_soon(shared_etcd: EtcdProcess, cluster: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with open_channel(address) as channel:

        async def lists() -> bool:
            await NodeServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=1)
            return True

        gone = time.monotonic() + _AWAY_S
        while time.monotonic() < gone:
            with pytest.raises(Exception, match="UNAVAILABLE"):
                await lists()
            await asyncio.sleep(0.1)
        async with running_registry(shared_etcd.endpoint, cluster, listen=address):
            await recovered("registry back after a long absence", lists, within_s=8)


async def test_a_registry_that_restarted_between_two_calls_answers_the_second(
    shared_etcd: EtcdProcess, cluster: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with open_channel(address) as channel:
        for _ in range(3):
            async with running_registry(shared_etcd.endpoint, cluster, listen=address, grace_s=0):
                call = NodeServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=5, wait_for_ready=True)
                assert list((await call).nodes) == []


async def test_etcd_that_was_away_for_long_is_found_soon(own_etcd: EtcdProcess) -> None:
    async with EtcdClient(EtcdOptions(endpoints=(own_etcd.endpoint,), total_s=0.5)) as client:

        async def reads() -> bool:
            await client.range(Get(b"/k"))
            return True

        assert await reads()
        own_etcd.kill()
        gone = time.monotonic() + _AWAY_S
        while time.monotonic() < gone:
            with pytest.raises(Exception, match="ETCD_UNAVAILABLE"):
                await reads()
        own_etcd.start()
        await recovered("etcd back after a long absence", reads, within_s=8)


FIVE_TIMES = """
import asyncio, sys
from pathlib import Path
from backhaul.registry.v1.registry_pb2 import ListNodesRequest
from backhaul.registry.v1.registry_pb2_grpc import NodeServiceStub
from backhaul_common.grpc_client import open_channel
from backhaul_registry.app import run as run_registry
from backhaul_registry.config import Config as RegistryConfig
from backhaul_node_agent.app import App
from backhaul_node_agent.config import Config as AgentConfig
async def once(number):
    stopping, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = RegistryConfig(listen="127.0.0.1:0", etcd_endpoints=(sys.argv[1],), cluster=sys.argv[2])
    async with asyncio.TaskGroup() as group:
        group.create_task(run_registry(config, stopping, listening.set_result))
        address = f"127.0.0.1:{await listening}"
        agent = App(AgentConfig(
            registry=(address,), listen="127.0.0.1:0", advertise="127.0.0.1:7201",
            engine_url="http://127.0.0.1:9", side_channel="127.0.0.1:9", drain_s=0,
            connector_socket=str(Path(sys.argv[3]) / "agent.sock"),
        ))
        group.create_task(agent.run(stopping))
        async with asyncio.timeout(20), open_channel(address) as channel:
            while not (await NodeServiceStub(channel).ListNodes(ListNodesRequest())).nodes:
                await asyncio.sleep(0.02)
        stopping.set()
for number in range(5):
    asyncio.run(once(number))
print("joined five times")
"""


def test_services_start_and_stop_again_and_again_in_one_process(
    shared_etcd: EtcdProcess, cluster: str, tmp_path: os.PathLike[str]
) -> None:
    command = [sys.executable, "-X", "dev", "-c", FIVE_TIMES, shared_etcd.endpoint, cluster, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.stdout.splitlines()[-1] == "joined five times", ended.stderr
    for complaint in ("different loop", "BlockingIOError", "never retrieved", "was destroyed", "Traceback"):
        assert complaint not in ended.stderr, ended.stderr
