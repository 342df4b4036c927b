"""One stack of real parts for all tests of this folder: two routers, two registries, a prefill and a decode node."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from backhaul_local.engines import EngineOptions
from backhaul_local.options import StackOptions
from backhaul_local.stack import Stack
from tests.e2e.stack.chat import Chat, Messages, Reply, answered, opening
from tests.fakes.otlp_collector import OtlpCollector
from tests.soak.network import BreakableNetwork

LEASE_TTL_S = 3.0
CLAIM_TTL_S = 10.0
KEYS = {"north": "key-of-north", "south": "key-of-south"}
CONNECTOR_SOCKET = "decode-1 > agent-decode-1"


@pytest.fixture(scope="session")
def network() -> Iterator[BreakableNetwork]:
    """Of which the link between the decode engine's connector and its agent can be broken."""
    with BreakableNetwork(only=[CONNECTOR_SOCKET]) as network:
        yield network


@pytest.fixture(scope="session")
def collector() -> Iterator[OtlpCollector]:
    """Gets the traces of all services and of both engines."""
    with OtlpCollector() as collector:
        yield collector


@pytest.fixture(scope="session")
def stack(
    engine_python: Path,
    tiny_model: Path,
    network: BreakableNetwork,
    collector: OtlpCollector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """The running stack."""
    endpoint = f"http://127.0.0.1:{collector.port}"
    traced = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_INSECURE": "true",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    flags = ("--otlp-traces-endpoint", endpoint)
    options = StackOptions(
        engine_python=engine_python,
        model=tiny_model,
        state=tmp_path_factory.mktemp("stack"),
        prefill=[EngineOptions(flags=flags, env={**traced, "OTEL_SERVICE_NAME": "prefill"})],
        decode=[EngineOptions(ttl_s=60, flags=flags, env={**traced, "OTEL_SERVICE_NAME": "decode"})],
        env=traced,
        registries=2,
        routers=2,
        agent_flags=["--lease-ttl-s", str(LEASE_TTL_S), "--claim-ttl-s", str(CLAIM_TTL_S)],
        # Generous: the engines of a test machine take all its cores.
        router_flags=["--prefer", "warm", "--lookup-budget-s", "0.5"],
        network=network,
    )
    with Stack(options) as stack:
        yield stack


@pytest.fixture(scope="session")
def chats(stack: Stack) -> Iterator[list[Chat]]:
    """A client of each router, once a conversation was seen to be warm through it."""
    with ExitStack() as exit_stack:
        clients = [Chat(url) for url in stack.routers]
        for client in clients:
            exit_stack.callback(client.http.close)
            eventually_warm(client)
        yield clients


@pytest.fixture
def chat(chats: list[Chat]) -> Chat:
    """A client of the first router."""
    return chats[0]


@pytest.fixture(scope="session")
def tenants(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Chat]]:
    """Clients of two tenants, through a router that knows them."""
    folder = tmp_path_factory.mktemp("tenants")
    lines = [
        f'[tenants.{name}]\nkey_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]' for name, key in KEYS.items()
    ]
    (folder / "tenants.toml").write_text("\n".join(lines))
    (folder / "cluster.key").write_text("0123456789abcdef" * 4)
    flags = ["--tenants-file", str(folder / "tenants.toml"), "--cluster-key-file", str(folder / "cluster.key")]
    url = stack.add_router([*flags, "--prefer", "warm", "--lookup-budget-s", "0.5"])
    with ExitStack() as exit_stack:
        clients = {name: Chat(url, headers={"authorization": f"Bearer {key}"}) for name, key in KEYS.items()}
        for client in clients.values():
            exit_stack.callback(client.http.close)
        yield clients


def conversation(chat: Chat, turns: int = 1, **body: Any) -> tuple[Messages, list[Reply]]:
    """Plays some turns; returns the messages of the turn after them, and the replies."""
    messages, replies = opening(), []
    for _ in range(turns):
        reply = chat.send(messages, **body)
        assert reply.status == 200, reply.raw
        replies.append(reply)
        messages = answered(messages, reply.text)
    return messages, replies


def eventually_warm(chat: Chat, within_s: float = 60) -> None:
    """Waits until a second turn is warm, unaided."""
    eventually(lambda: chat.send(conversation(chat)[0]).route == "warm", within_s)


def eventually(holds: Callable[[], bool], within_s: float) -> None:
    """Waits until something holds; raises AssertionError when it does not in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.1)
