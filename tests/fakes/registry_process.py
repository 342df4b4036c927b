"""The registry, run inside the test's event loop or as a process of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from backhaul.registry.v1.registry_pb2_grpc import IndexServiceStub, NodeServiceStub
from backhaul_common.grpc_client import open_channel
from backhaul_common.tls import Identity
from backhaul_registry import app
from backhaul_registry.config import Config


@dataclass(frozen=True, slots=True)
class Registry:
    """A running registry and ways to call it."""

    address: str
    channel: grpc.aio.Channel
    nodes: Any
    index: Any
    stopping: asyncio.Event
    ended: "asyncio.Task[None]"


@asynccontextmanager
async def running_registry(
    endpoint: str, cluster: str, *, caller: Identity | None = None, **settings: Any
) -> AsyncIterator[Registry]:
    """Runs one replica against etcd; leaving stops it as SIGTERM would. ``caller`` is what its own caller shows."""
    config = Config(**{"listen": "127.0.0.1:0", "etcd_endpoints": (endpoint,), "cluster": cluster, **settings})
    stopping = asyncio.Event()
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(app.run(config, stopping, listening.set_result))
    try:
        port = await listening
        address = f"127.0.0.1:{port}"
        async with open_channel(address, caller) as channel:
            yield Registry(address, channel, NodeServiceStub(channel), IndexServiceStub(channel), stopping, task)
    finally:
        stopping.set()
        async with asyncio.timeout(10):
            await task
