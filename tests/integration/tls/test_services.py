"""Registry, agent, etcd and engine over TLS, and who may do what there."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_common.call import main as call_from_command_line
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_local.certificates import Authority, name_of
from backhaul_node_agent.app import App
from backhaul_node_agent.config import Config as AgentConfig
from backhaul_registry import app as registry_app
from backhaul_registry.config import Config as RegistryConfig
from backhaul_router.app import running as running_router
from backhaul_router.config import Config as RouterConfig
from tests.contract.owner_node import AgentNode, agent_node
from tests.fakes.certificates import OVER, identity, settings
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually
from tests.fakes.registry_process import Registry, running_registry
from tests.integration.system import System

pytestmark = pytest.mark.etcd


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


@dataclass
class Etcd:
    """With TLS."""

    endpoint: str
    settings: dict[str, str]
    """A registry's, with which it is let in."""


@pytest.fixture
def etcd(authority: Authority, tmp_path: Path) -> Iterator[Etcd]:
    pair, client = authority.issue("etcd"), authority.issue("registry-at-etcd")
    flags = ("--cert-file", str(pair.cert), "--key-file", str(pair.key), "--trusted-ca-file", str(authority.path))
    shown = {"etcd_cert": str(client.cert), "etcd_key": str(client.key), "etcd_ca": str(authority.path)}
    with EtcdProcess(tmp_path, *flags, "--client-cert-auth", scheme="https") as process:
        yield Etcd(process.endpoint, shown)


NAMES = {"tls_callers": (name_of("router"),), "tls_agents": (name_of("agent"),)}


@asynccontextmanager
async def secure_registry(authority: Authority, etcd: Etcd, cluster: str) -> AsyncIterator[Registry]:
    """Its certificate names no host; its own caller is a router."""
    shown = settings(authority.issue("registry"), authority)
    router = identity(authority.issue("router"), authority)
    async with running_registry(etcd.endpoint, cluster, caller=router, **shown, **etcd.settings, **NAMES) as registry:
        yield registry


@asynccontextmanager
async def secure_agent(
    authority: Authority, registry: Registry, folder: Path, **options: Any
) -> AsyncIterator[AgentNode]:
    """Its own caller is a router, its engine one with TLS."""
    defaults = {
        **settings(authority.issue("agent"), authority),
        "tls_registry_name": name_of("registry"),
        "tls_callers": (name_of("router"),),
        "caller": identity(authority.issue("router"), authority),
        "engine_tls": identity(authority.issue("engine"), authority),
    }
    async with agent_node(folder, registry.address, **{**defaults, **options}) as agent:
        yield agent


async def test_what_an_agent_publishes_a_router_finds_and_claims(
    authority: Authority, etcd: Etcd, cluster: str, tmp_path: Path
) -> None:
    async with (
        secure_registry(authority, etcd, cluster) as registry,
        secure_agent(authority, registry, tmp_path) as agent,
    ):
        system = System(registry, agent)
        await system.begin()
        assert await system.claims()


async def test_nobody_does_what_others_are_for(authority: Authority, etcd: Etcd, cluster: str, tmp_path: Path) -> None:
    router, node_agent = (identity(authority.issue(role), authority) for role in ("router", "agent"))
    async with (
        secure_registry(authority, etcd, cluster) as registry,
        secure_agent(authority, registry, tmp_path) as agent,
        open_channel(registry.address, router) as as_router,
        open_channel(registry.address, node_agent) as as_agent,
        open_channel(f"127.0.0.1:{agent.app.port}", node_agent) as from_agent,
    ):
        publish = registry_pb2_grpc.IndexServiceStub(as_router).PublishBlockSets()
        assert await refusal(publish) == "CALLER_REFUSED"
        join = registry_pb2_grpc.NodeServiceStub(as_router).JoinNode()
        assert await refusal(join) == "CALLER_REFUSED"
        find = registry_pb2.FindBlockSetsRequest(scope="scope-1", keys=["key"])
        assert await refusal(registry_pb2_grpc.IndexServiceStub(as_agent).FindBlockSets(find)) == "CALLER_REFUSED"
        watch = registry_pb2_grpc.NodeServiceStub(as_agent).WatchNodes(registry_pb2.WatchNodesRequest())
        assert await refusal(watch) == "CALLER_REFUSED"
        owner = agent_pb2_grpc.BlockSetServiceStub(from_agent)
        assert await refusal(owner.ClaimBlockSet(agent_pb2.ClaimBlockSetRequest())) == "CALLER_REFUSED"
        load = agent_pb2_grpc.LoadServiceStub(from_agent).WatchLoad(agent_pb2.WatchLoadRequest())
        assert await refusal(load) == "CALLER_REFUSED"


async def refusal(call: Any) -> str:
    """Returns the reason for which a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return to_error(caught.value).reason


async def test_an_agent_that_cannot_prove_itself_is_not_listed(
    authority: Authority, stranger: Authority, etcd: Etcd, cluster: str, tmp_path: Path
) -> None:
    refused: dict[str, dict[str, Any]] = {
        "of another CA": settings(stranger.issue("agent"), authority),
        "that trusts another CA": settings(authority.issue("agent2"), stranger),
        "without TLS": {**dict.fromkeys(("tls_cert", "tls_key", "tls_ca", "tls_registry_name"), ""), "tls_callers": ()},
    }
    async with secure_registry(authority, etcd, cluster) as registry:
        for index, (what, shown) in enumerate(refused.items()):
            with capture_logs() as logs:
                async with secure_agent(authority, registry, tmp_path / str(index), caller=None, **shown) as agent:
                    await agent.connector.connect()
                    await eventually(lambda: any(log["event"] == "node session interrupted" for log in logs))
            listed = await registry.nodes.ListNodes(registry_pb2.ListNodesRequest(), timeout=5)
            assert not listed.nodes, what


@pytest.mark.parametrize("what", ["of another CA", "expired"])
async def test_an_engine_that_cannot_prove_itself_is_not_asked(
    authority: Authority, stranger: Authority, tmp_path: Path, what: str
) -> None:
    pair = stranger.issue("engine") if what == "of another CA" else authority.issue("old", life=OVER)
    shown: dict[str, Any] = {"engine_tls": identity(pair, authority), "engine_ca": str(authority.path)}
    with capture_logs() as logs:
        async with agent_node(tmp_path, "127.0.0.1:9", **shown) as agent:
            await eventually(lambda: any("its certificate is not accepted" in log.get("problem", "") for log in logs))
            assert agent.http.requests == []


@pytest.mark.parametrize("service", ["registry", "agent", "router"])
async def test_a_service_does_not_start_with_files_that_it_cannot_use(authority: Authority, service: str) -> None:
    shown: dict[str, Any] = settings(authority.issue(service, life=OVER), authority)
    stopping = asyncio.Event()

    async def router() -> None:
        async with running_router(RouterConfig(registry=("127.0.0.1:9",), **shown)):
            pass

    starts: dict[str, Callable[[], Awaitable[None]]] = {
        "registry": lambda: registry_app.run(RegistryConfig(**shown), stopping),
        "agent": lambda: App(AgentConfig(**shown)).run(stopping),
        "router": router,
    }
    with pytest.raises(InvalidArgumentError, match=f"{service}.pem has expired on .*: have a new one issued"):
        await starts[service]()


async def test_an_operator_calls_from_the_command_line(
    authority: Authority, etcd: Etcd, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = authority.issue("router")
    async with secure_registry(authority, etcd, cluster) as registry:
        call = [registry.address, "backhaul.registry.v1.NodeService/ListNodes"]
        shown = ["--tls-ca", str(authority.path), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
        await asyncio.to_thread(call_from_command_line, [*call, *shown, "--tls-name", name_of("registry")])
        assert '"nodes": []' in capsys.readouterr().out
        with pytest.raises(SystemExit, match="UNAVAILABLE"):
            await asyncio.to_thread(call_from_command_line, [*call, *shown, "--tls-name", name_of("agent")])
        with pytest.raises(SystemExit):
            await asyncio.to_thread(call_from_command_line, [*call, *shown[:4]])
        assert "--tls-cert and --tls-key go together" in capsys.readouterr().err
