"""A router with fakes around it, over real sockets."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from backhaul.registry.v1 import registry_pb2
from backhaul_common.addresses import join_address
from backhaul_common.tls import CallerContext, Identity
from backhaul_router.app import Running, running
from backhaul_router.config import Config
from backhaul_router.owner_client import OwnerClient
from tests.fakes.directory import FakeDirectory
from tests.fakes.engine import FakeEngine
from tests.fakes.eventually import eventually
from tests.fakes.leaks import no_tasks_left
from tests.fakes.owner import FakeOwner

CHAT = "/v1/chat/completions"
MODEL = "tiny"


@dataclass
class RouterStack:
    """What a test talks to."""

    directory: FakeDirectory
    owner: FakeOwner
    prefill: FakeEngine
    decode: FakeEngine
    router: Running
    client: aiohttp.ClientSession
    exits: AsyncExitStack
    host: str
    scheme: str

    @property
    def url(self) -> str:
        """Base URL of the router."""
        return f"{self.scheme}://{join_address(self.host, self.router.http_port)}"

    def hold(self, set_id: str = "set-1", *, tokens: int = 128) -> None:
        """Lets the owner hold a block set of the decode engine."""
        self.owner.hold(set_id, engine_id=self.decode.engine_id, token_count=tokens)

    def publish(self, key: str, set_id: str = "set-1", **fields: Any) -> None:
        """Publishes a pointer to a block set of the decode engine."""
        self.directory.publish(
            key, set_id=set_id, node_id=f"decode-{self.decode.port}", engine_id=self.decode.engine_id, **fields
        )

    async def add(self, engine: FakeEngine, **fields: Any) -> FakeEngine:
        """Starts another engine and lists it; returns when the router knows."""
        await self.exits.enter_async_context(engine)
        fields.setdefault("agent", self.owner.address)
        node = await self.directory.add(engine, **fields)
        await eventually(lambda: self.router.table.get(node.node_id) is not None)
        return engine

    async def told(self) -> None:
        """Waits until owners have been told all that they were to be told in the background.

        Before, that something was not released shows nothing.
        """

        def telling() -> bool:
            running = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
            return OwnerClient._repeat.__qualname__ in running

        await eventually(lambda: not telling())

    async def lose(self, engine: FakeEngine) -> None:
        """Removes the node of an engine that was not well; returns when the router knows."""
        node_id = f"{engine.role}-{engine.port}"
        node = self.directory.nodes[node_id]
        node.state = registry_pb2.NODE_STATE_NOT_READY
        await self.directory.put(node)
        await self.directory.remove(node_id)
        await eventually(lambda: self.router.table.get(node_id) is None)

    async def chat(self, *contents: str, headers: dict[str, str] | None = None, **fields: Any) -> "Got":
        """Sends a chat turn; contents alternate between user and assistant."""
        return await self.post(CHAT, chat_body(*contents, **fields), headers)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> "Got":
        """Sends a body and reads the whole answer."""
        data = io.BytesIO(json.dumps(body).encode())
        headers = {"content-type": "application/json", **(headers or {})}
        async with self.client.post(f"{self.url}{path}", data=data, headers=headers) as response:
            return Got(response.status, response.headers, await response.read())


@dataclass
class Got:
    """An answer."""

    status: int
    headers: Any
    body: bytes

    @property
    def route(self) -> str:
        """How the turn was served."""
        return str(self.headers.get("x-backhaul-route"))

    @property
    def miss(self) -> str:
        """Why it was cold."""
        return str(self.headers.get("x-backhaul-miss", ""))


def chat_body(*contents: str, **fields: Any) -> dict[str, Any]:
    """Returns a chat body; contents alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents or ("hi",))]
    return {"model": MODEL, "messages": messages, **fields}


@asynccontextmanager
async def router_stack(
    *,
    prefill: FakeEngine | None = None,
    decode: FakeEngine | None = None,
    listed: bool = True,
    host: str = "127.0.0.1",
    tls: Identity | None = None,
    client_tls: Identity | None = None,
    **config: Any,
) -> AsyncIterator[RouterStack]:
    """Starts one prefill and one decode engine, an owner, a registry and a router that knows them all.

    ``tls`` is what all but the router show, which is configured to, ``client_tls`` what its client does.

    Leaving fails the test when tasks are left behind.
    """
    async with no_tasks_left(), AsyncExitStack() as exits:
        directory = await exits.enter_async_context(FakeDirectory(host, tls=tls))
        owner = await exits.enter_async_context(FakeOwner(host, tls=tls))
        p = await exits.enter_async_context(prefill or FakeEngine("prefill", host=host, tls=tls))
        d = await exits.enter_async_context(decode or FakeEngine("decode", host=host, tls=tls))
        if listed:
            await directory.add(p, agent=owner.address)
            await directory.add(d, agent=owner.address)
        listening = {"listen_http": join_address(host, 0), "listen_grpc": join_address(host, 0)}
        router = await exits.enter_async_context(router_for((directory.address,), **{**listening, **config}))
        client = await exits.enter_async_context(_session(client_tls))
        if listed:
            await eventually(lambda: len(router.table) == 2)
        scheme = "https" if config.get("tls_cert") else "http"
        yield RouterStack(directory, owner, p, d, router, client, exits, host, scheme)


def _session(tls: Identity | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=CallerContext(tls).current() if tls else True))


@asynccontextmanager
async def router_for(registries: Sequence[str], **config: Any) -> AsyncIterator[Running]:
    """Starts a router on free ports, with limits that suit a busy machine."""
    defaults = {
        "listen_http": "127.0.0.1:0",
        "listen_grpc": "127.0.0.1:0",
        "lookup_budget_s": 1.0,
        "grace_s": 0.0,
        "lame_duck_s": 0.0,
        # What most tests are about; by estimate, engines of no speed would take any route.
        "prefer": "warm",
    }
    async with running(Config(registry=tuple(registries), **{**defaults, **config})) as router:
        yield router
