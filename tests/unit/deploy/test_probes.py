"""What probes ask, and what routers and gRPC servers answer."""

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backhaul_common.grpc_server import GrpcServer
from backhaul_router.app import running
from backhaul_router.config import Config
from tests.unit.deploy import started
from tests.unit.deploy.cluster import OVERLAYS, containers


def asked(kind: str, field: str) -> set[str]:
    """Returns what probes of one kind ask of Backhaul's services, in all overlays."""
    ours = [one for overlay in OVERLAYS for one in containers(overlay) if started.program_of(one) in started.CONFIGS]
    return {probe[kind].get(field, "") for container in ours for probe in container.probes if kind in probe}


async def test_every_path_is_one_that_the_router_answers() -> None:
    paths = asked("httpGet", "path")
    config = Config(
        registry=("127.0.0.1:1",), listen_http="127.0.0.1:0", listen_grpc="127.0.0.1:0", lame_duck_s=0, grace_s=0
    )
    async with running(config) as router, aiohttp.ClientSession() as session:
        answers = {}
        for path in paths:
            async with session.get(f"http://127.0.0.1:{router.http_port}{path}") as answer:
                answers[path] = answer.status
    assert answers == {"/health": 200, "/ready": 503}, "without nodes: alive, and not ready"


async def test_every_health_name_is_one_that_grpc_servers_know() -> None:
    names = asked("grpc", "service")
    assert names == {"", "liveness"}
    async with (
        GrpcServer(address="127.0.0.1:0", service_names=()) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        for name in names:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
