"""The processes: engines, a registry with its etcd, a router, Envoy with and without one behind it, vllm-router."""

import asyncio
import os
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul.registry.v1 import registry_pb2_grpc
from backhaul_common.durations import duration
from backhaul_common.grpc_client import open_channel
from backhaul_local.envoy import EnvoyAddresses, envoy_binary, envoy_spec
from backhaul_local.etcd import EtcdMember, etcd_spec
from backhaul_local.ports import HOST, Ports
from backhaul_local.probes import grpc_ready, http_ready
from backhaul_local.processes import LocalError, ProcessSpec, Supervisor
from benchmarks.overhead.engine import MODEL

_READY_S = 60.0
_TTL_S = 30.0
_KEEP_S = 5.0

_PLAIN = Path(__file__).with_name("plain-envoy.yaml")
"""Envoy's side of the comparison: the same listener and connections, and nothing that chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """host:port of all that listens."""

    prefill: str
    decode: str
    etcd: str
    etcd_peer: str
    registry: str
    http: str
    grpc: str
    picker: str
    envoy: str
    envoy_admin: str
    plain: str
    peer: str
    peer_metrics: str


def peer_binary() -> Path | None:
    """Returns vllm-router's command: the one that BACKHAUL_VLLM_ROUTER_BINARY names, or the one in the path."""
    found = os.environ.get("BACKHAUL_VLLM_ROUTER_BINARY") or shutil.which("vllm-router")
    return Path(found) if found and Path(found).exists() else None


@contextmanager
def fleet(state: Path, *, peer: Path | None) -> Iterator[tuple[Supervisor, Addresses]]:
    """Starts everything but the nodes, which `joined` lists; ``peer``: vllm-router's command. Raises LocalError."""
    ports = Ports()
    at = Addresses(**{name: f"{HOST}:{ports.take()}" for name in Addresses.__slots__})
    with Supervisor(state / "logs") as supervisor:
        for name, address in (("prefill", at.prefill), ("decode", at.decode)):
            command = [sys.executable, "-m", "benchmarks.overhead.engine", _port(address)]
            supervisor.start(ProcessSpec(name=name, command=command))
        supervisor.wait_for_all(
            {"prefill": _http(at.prefill, "/health"), "decode": _http(at.decode, "/health")}, _READY_S
        )
        _start_registry(supervisor, state, at)
        _start_router(supervisor, at)
        if peer is not None:
            _start_peer(supervisor, at, peer)
        _start_envoys(supervisor, state, at)
        yield supervisor, at


@asynccontextmanager
async def joined(at: Addresses) -> AsyncIterator[None]:
    """Lists both engines, as their agents would, and waits until the router knows them. Raises LocalError."""
    async with open_channel(at.registry) as channel, asyncio.TaskGroup() as tasks:
        nodes = (_node("prefill", pb.ROLE_PREFILL, at.prefill), _node("decode", pb.ROLE_DECODE, at.decode))
        stub = registry_pb2_grpc.NodeServiceStub(channel)
        keeping = [tasks.create_task(_keep(stub, node)) for node in nodes]
        for ready in (_http(at.http, "/ready"), _http(at.envoy, "/ready")):
            await _until(ready)
        yield
        for task in keeping:
            task.cancel()


async def _until(ready: partial[bool]) -> None:
    for _ in range(100):
        if await asyncio.to_thread(ready):
            return
        await asyncio.sleep(0.1)
    raise LocalError("the router does not get ready: see its log")


def _node(name: str, role: pb.Role.ValueType, address: str) -> pb.Node:
    engine = pb.Engine(
        engine_id=f"{name}-1-engine",
        compatibility_hash="0" * 64,
        weights_digest="0" * 32,
        block_size=16,
        block_count=10_000,
        retention_ttl=duration(480),
        connector_version="0.1.0",
        reuse=True,
        vllm_version="0.32.0",
    )
    return pb.Node(
        node_id=f"{name}-1",
        session=uuid.uuid4().hex,
        role=role,
        # Nobody listens there: of engines whose agents say nothing a router knows what it has seen itself.
        agent_address=f"{HOST}:9",
        engine_url=f"http://{address}",
        models=[MODEL],
        engines=[engine],
        state=pb.NODE_STATE_READY,
    )


async def _keep(stub: "registry_pb2_grpc.NodeServiceAsyncStub", node: pb.Node) -> None:
    async def requests() -> AsyncIterator[pb.JoinNodeRequest]:
        yield pb.JoinNodeRequest(sequence=1, join=pb.JoinNodeRequest.Join(node=node, ttl=duration(_TTL_S)))
        sequence = 1
        while True:
            await asyncio.sleep(_KEEP_S)
            sequence += 1
            yield pb.JoinNodeRequest(sequence=sequence, keep_alive=pb.JoinNodeRequest.KeepAlive())

    async for _ in stub.JoinNode(requests()):
        pass


def _start_registry(supervisor: Supervisor, state: Path, at: Addresses) -> None:
    member = EtcdMember(
        name="etcd", client_port=int(_port(at.etcd)), peer_port=int(_port(at.etcd_peer)), data=state / "etcd"
    )
    supervisor.start(etcd_spec(member, [member]))
    supervisor.wait_until("etcd", _http(at.etcd, "/health"), _READY_S)
    flags = ("--listen", at.registry, "--etcd-endpoints", at.etcd, "--log-level", "warning")
    supervisor.start(ProcessSpec(name="registry", command=[_script("backhaul-registry"), *flags]))
    supervisor.wait_until("registry", partial(grpc_ready, at.registry), _READY_S)


def _start_router(supervisor: Supervisor, at: Addresses) -> None:
    flags = ["--listen-http", at.http, "--listen-grpc", at.grpc, "--listen-ext-proc", at.picker]
    # Both legs of each turn, as the others do; left to itself it would have decode compute short prompts.
    flags += ["--registry", at.registry, "--prefer", "cold", "--lame-duck-s", "0"]
    supervisor.start(ProcessSpec(name="router", command=[_script("backhaul-router"), *flags]))
    supervisor.wait_until("router", _http(at.http, "/health"), _READY_S)


def _start_peer(supervisor: Supervisor, at: Addresses, binary: Path) -> None:
    host, port = at.peer.split(":")
    command = [str(binary), "--vllm-pd-disaggregation", "--policy", "round_robin", "--host", host, "--port", port]
    command += ["--prefill", f"http://{at.prefill}", "--decode", f"http://{at.decode}"]
    command += ["--prometheus-port", _port(at.peer_metrics)]
    supervisor.start(ProcessSpec(name="vllm-router", command=command))
    supervisor.wait_until("vllm-router", _http(at.peer, "/health"), _READY_S)


def _start_envoys(supervisor: Supervisor, state: Path, at: Addresses) -> None:
    addresses = EnvoyAddresses(listen=at.envoy, admin=at.envoy_admin, routers=[at.http], pickers=[at.picker])
    supervisor.start(envoy_spec(addresses, state / "envoy.yaml"))
    config = state / "plain-envoy.yaml"
    text = _PLAIN.read_text()
    config.write_text(text.replace("{LISTEN}", _port(at.plain)).replace("{DECODE}", _port(at.decode)))
    command = [str(envoy_binary()), "--config-path", str(config), "--log-level", "warning"]
    command += ["--concurrency", "1", "--disable-hot-restart"]
    supervisor.start(ProcessSpec(name="plain-envoy", command=command))
    supervisor.wait_until("plain-envoy", _http(at.plain, "/health"), _READY_S)


def _http(address: str, path: str) -> partial[bool]:
    return partial(http_ready, f"http://{address}{path}")


def _script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _port(address: str) -> str:
    return address.rsplit(":", 1)[1]
