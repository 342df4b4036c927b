"""gRPC between services: who is let in, who is talked to, and what happens when files change."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from backhaul.registry.v1 import registry_pb2 as registry
from backhaul.registry.v1.registry_pb2_grpc import NodeServiceStub, add_NodeServiceServicer_to_server
from backhaul_common.errors import PermissionDeniedError, UnavailableError
from backhaul_common.grpc_client import open_channel, to_error
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import Identity, TlsFiles, channels
from backhaul_local.certificates import Authority, Pair, name_of, uri_of
from tests.fakes.certificates import OVER, both, identity, take
from tests.fakes.eventually import eventually
from tests.fakes.partial import Partial

NODES = "backhaul.registry.v1.NodeService"


class Nodes(Partial):
    """Answers at once, or streams until it is told to end; remembers who called."""

    def __init__(self) -> None:
        self.certificates: list[bytes] = []
        self.ending = asyncio.Event()

    async def ListNodes(self, request: Any, context: Any) -> Any:
        self.certificates.append(context.auth_context()["x509_pem_cert"][0])
        return registry.ListNodesResponse(revision=7)

    async def WatchNodes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield registry.WatchNodesResponse(revision=1)
        await self.ending.wait()
        yield registry.WatchNodesResponse(revision=2)

    async def JoinNode(self, requests: Any, context: Any) -> None:
        await context.write(registry.JoinNodeResponse(sequence=1))


@asynccontextmanager
async def serving(
    tls: Identity | None,
    *,
    nodes: Nodes | None = None,
    callers: Sequence[str] = (),
    callers_of: Mapping[str, Sequence[str]] | None = None,
) -> AsyncIterator[str]:
    server = GrpcServer(
        address="127.0.0.1:0", service_names=(NODES,), tls=tls, callers=callers, callers_of=callers_of or {}
    )
    add_NodeServiceServicer_to_server(cast(Any, nodes or Nodes()), server.server)
    async with server:
        yield f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("secure", [True, False])
async def test_who_connects_and_says_nothing_is_let_go(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    monkeypatch.setattr("backhaul_common.grpc_server.HANDSHAKE_S", 0.2)
    async with serving(identity(authority.issue("registry"), authority) if secure else None) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        async with asyncio.timeout(30):
            # Without TLS gRPC greets first.
            await reader.read()
        writer.close()
        await writer.wait_closed()


async def ask(address: str, tls: Identity | None, *, name: str = "") -> int:
    """Calls once, over a connection of its own. Raises BackhaulError."""
    async with open_channel(address, tls, name=name) as channel:
        return await call(channel)


async def call(channel: grpc.aio.Channel) -> int:
    try:
        answer = await NodeServiceStub(channel).ListNodes(registry.ListNodesRequest(), timeout=5)
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    return answer.revision


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


async def test_certificates_of_one_ca_know_one_another(authority: Authority) -> None:
    async with serving(identity(authority.issue("registry"), authority)) as address:
        assert await ask(address, identity(authority.issue("router"), authority)) == 7


async def test_a_caller_that_cannot_prove_itself_is_refused(authority: Authority, stranger: Authority) -> None:
    refused = {
        "of another CA": identity(stranger.issue("router"), authority),
        "expired": identity(authority.issue("old", life=OVER), authority),
        "without a certificate": identity(None, authority),
        "without TLS": None,
    }
    async with serving(identity(authority.issue("registry"), authority)) as address:
        for tls in refused.values():
            with pytest.raises(UnavailableError):
                await ask(address, tls)


async def test_a_server_that_cannot_prove_itself_is_not_talked_to(authority: Authority, stranger: Authority) -> None:
    ours = identity(authority.issue("router"), authority)
    refused = {
        "of another CA": identity(stranger.issue("registry"), authority),
        "expired": identity(authority.issue("old", life=OVER), authority),
        "of another host": identity(authority.issue("away", hosts=("10.0.0.1", "registry.example")), authority),
        "without TLS": None,
    }
    for tls in refused.values():
        nodes = Nodes()
        async with serving(tls, nodes=nodes) as address:
            with pytest.raises(UnavailableError):
                await ask(address, ours)
        assert nodes.certificates == []


async def test_a_name_replaces_the_host(authority: Authority) -> None:
    ours = identity(authority.issue("router"), authority)
    async with serving(identity(authority.issue("agent", hosts=()), authority)) as address:
        assert await ask(address, ours, name=name_of("agent")) == 7
        for name in ("", name_of("registry")):
            with pytest.raises(UnavailableError):
                await ask(address, ours, name=name)


@pytest.mark.parametrize("named", [name_of, uri_of])
async def test_only_callers_with_an_accepted_name_are_let_in(authority: Authority, named: Any) -> None:
    router, agent = (identity(authority.issue(role), authority) for role in ("router", "agent"))
    async with serving(router, callers=(named("router"), named("operator"))) as address:
        assert await ask(address, router) == 7
        with pytest.raises(PermissionDeniedError, match="CALLER_REFUSED"):
            await ask(address, agent)


async def test_single_methods_have_callers_of_their_own(authority: Authority) -> None:
    router, agent = (identity(authority.issue(role), authority) for role in ("router", "agent"))
    joining = {"JoinNode": (name_of("agent"),)}
    async with serving(router, callers=(name_of("router"),), callers_of=joining) as address:
        assert (await joins(address, agent), await joins(address, router)) == ("OK", "PERMISSION_DENIED")
        assert (await watches(address, agent), await watches(address, router)) == ("PERMISSION_DENIED", "OK")


async def joins(address: str, tls: Identity) -> str:
    async with open_channel(address, tls) as channel:
        requests = iter([registry.JoinNodeRequest(sequence=1)])
        return await _outcome(NodeServiceStub(channel).JoinNode(requests, timeout=5))


async def watches(address: str, tls: Identity) -> str:
    async with open_channel(address, tls) as channel:
        return await _outcome(NodeServiceStub(channel).WatchNodes(registry.WatchNodesRequest(), timeout=5))


async def _outcome(stream: Any) -> str:
    try:
        await stream.read()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_calls_go_out_under_the_certificate_that_is_in_force_and_what_runs_goes_on(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "LAST_CALLS_S", 0.1)
    shown, nodes = authority.issue("router"), Nodes()
    tls = identity(shown, authority)
    async with (
        serving(identity(authority.issue("registry"), authority), nodes=nodes) as address,
        open_channel(address, tls) as channel,
    ):
        stub = NodeServiceStub(channel)
        watch: Any = stub.WatchNodes(registry.WatchNodesRequest())
        assert (await watch.read()).revision == 1
        await call(channel)
        take(authority.issue("next"), shown)
        tls.look()
        await stub.ListNodes(registry.ListNodesRequest(), timeout=5)
        assert [pem.strip() for pem in nodes.certificates][1] == shown.cert.read_bytes().strip()
        assert nodes.certificates[0] != nodes.certificates[1]
        # Longer than the channel of the old certificate is kept.
        await asyncio.sleep(0.3)
        nodes.ending.set()
        assert ((await watch.read()).revision, await watch.read()) == (2, grpc.aio.EOF)


async def test_a_server_shows_and_trusts_what_is_in_force_and_keeps_its_connections(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    shown, ca = authority.issue("registry"), both(tmp_path / "ca.pem", authority)
    tls = Identity("services", TlsFiles(cert=str(shown.cert), key=str(shown.key), ca=str(ca)))
    before = identity(authority.issue("router"), authority)
    after = identity(stranger.issue("router"), stranger)
    async with serving(tls) as address, open_channel(address, before) as standing:
        assert await call(standing) == 7
        with pytest.raises(UnavailableError):
            await ask(address, after)
        take(stranger.issue("registry"), shown)
        both(ca, stranger)
        tls.look()
        assert await ask(address, after) == 7
        with pytest.raises(UnavailableError):
            await ask(address, before)
        assert await call(standing) == 7


async def test_calls_under_load_survive_one_new_certificate_after_the_other(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    """The CA is replaced as well: first there are both, then certificates of the new one, then it alone."""
    ca = both(tmp_path / "ca.pem", authority)
    sides = [authority.issue("registry"), authority.issue("router")]
    parts = [Identity(str(side.cert), TlsFiles(cert=str(side.cert), key=str(side.key), ca=str(ca))) for side in sides]
    stopping, answers = asyncio.Event(), []

    async def load(channel: grpc.aio.Channel) -> None:
        while not stopping.is_set():
            answers.append(await call(channel))

    def look() -> None:
        for part in parts:
            part.look()

    async def more() -> None:
        count = len(answers)
        await eventually(lambda: len(answers) > count + 50, 20)

    async with serving(parts[0]) as address, open_channel(address, parts[1]) as channel, asyncio.TaskGroup() as group:
        loads = [group.create_task(load(channel)) for _ in range(8)]
        await more()
        for steps in (
            lambda: both(ca, authority, stranger),
            lambda: _replace(authority, sides),
            lambda: _replace(stranger, sides),
            lambda: both(ca, stranger),
            lambda: _replace(stranger, sides),
        ):
            steps()
            look()
            await more()
        stopping.set()
    assert set(answers) == {7}
    # A call that gRPC cancels ends its task without an error.
    assert not any(task.cancelled() for task in loads)


def _replace(authority: Authority, sides: Sequence[Pair]) -> None:
    for side in sides:
        take(authority.issue(f"next-{side.cert.stem}"), side)
