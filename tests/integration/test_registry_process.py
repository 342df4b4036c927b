"""The registry as a process of its own."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul.registry.v1.registry_pb2_grpc import NodeServiceStub
from backhaul_common.grpc_client import open_channel
from tests.fakes import samples
from tests.fakes.etcd_process import EtcdProcess, free_port
from tests.fakes.eventually import eventually
from tests.fakes.registry_process import Registry
from tests.fakes.streams import Joining, Publishing, Watching

pytestmark = pytest.mark.etcd

PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")


@asynccontextmanager
async def process(*arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def test_sigterm_ends_streams_and_the_process_in_time(shared_etcd: EtcdProcess, cluster: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    arguments = ("backhaul_registry", "--listen", address, "--etcd-endpoints", shared_etcd.endpoint)
    async with process(*arguments, "--cluster", cluster, **PROXIES) as running, open_channel(address) as channel:

        async def serving() -> bool:
            request = health_pb2.HealthCheckRequest(service="backhaul.registry.v1.NodeService")
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5, wait_for_ready=True)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        await eventually(serving, 15)
        nodes = NodeServiceStub(channel)
        async with Joining(nodes) as join, Watching(nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
            await join.join(samples.node())
            await watch.next()
            running.send_signal(signal.SIGTERM)
            stopped = time.monotonic()
            assert (await watch.failure()).reason == "SHUTTING_DOWN"
            assert (await join.failure()).reason == "SHUTTING_DOWN"
            assert time.monotonic() - stopped < 1
        async with asyncio.timeout(5):
            assert await running.wait() == 0
        assert running.stdout is not None
        log = (await running.stdout.read()).decode()
        assert "Traceback" not in log
        assert '"event": "stopped"' in log


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        pytest.param(("--nonsense", "1"), {}, "--nonsense", id="flag"),
        pytest.param((), {"BACKHAUL_REGISTRY_NONSENSE": "1"}, "BACKHAUL_REGISTRY_NONSENSE", id="variable"),
        pytest.param(("--pointer-ttl-s", "soon"), {}, "--pointer-ttl-s", id="type"),
    ],
)
async def test_a_wrong_setting_ends_the_process_with_code_2_and_its_name(
    arguments: tuple[str, ...], environment: dict[str, str], complaint: str
) -> None:
    async with process("backhaul_registry", *arguments, **environment) as running:
        async with asyncio.timeout(15):
            output, _ = await running.communicate()
    assert running.returncode == 2
    assert complaint in output.decode().splitlines()[-1]


async def test_a_publisher_that_is_killed_leaves_its_pointers(registry: Registry) -> None:
    code = (
        "import asyncio, sys\n"
        "from tests.fakes import samples\n"
        "from tests.fakes.streams import Publishing\n"
        "from backhaul.registry.v1.registry_pb2_grpc import IndexServiceStub\n"
        "from backhaul_common.grpc_client import open_channel\n"
        "async def main():\n"
        "    async with open_channel(sys.argv[1]) as channel, Publishing(IndexServiceStub(channel)) as stream:\n"
        "        await stream.open()\n"
        "        await stream.batch([samples.pointer()])\n"
        "        print('published', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    publisher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, registry.address), stdout=asyncio.subprocess.PIPE, cwd=os.getcwd()
    )
    assert publisher.stdout is not None
    assert await publisher.stdout.readline() == b"published\n"
    publisher.kill()
    await publisher.wait()
    await asyncio.sleep(1)
    request = pb.FindBlockSetsRequest(scope="scope", keys=["k1"])
    assert len((await registry.index.FindBlockSets(request, timeout=5)).pointers) == 1


async def test_cancelled_publishers_leave_their_pointers_every_time(registry: Registry) -> None:
    for number in range(20):
        async with Publishing(registry.index) as stream:
            await stream.open()
            await stream.batch([samples.pointer(f"set-{number}", key=f"k{number}")])
    await asyncio.sleep(0.5)
    answer = await registry.index.ListBlockSets(pb.ListBlockSetsRequest(), timeout=5)
    assert len(answer.pointers) == 20
