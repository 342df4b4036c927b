"""A registry and an agent on an etcd that has its troubles, and what routers see of them."""

import asyncio
import time
import uuid
from dataclasses import dataclass

from backhaul.registry.v1 import registry_pb2 as pb
from tests.contract.owner_node import AgentNode, reuses
from tests.fakes.eventually import eventually
from tests.fakes.recovery import recovered
from tests.fakes.registry_process import Registry
from tests.fakes.streams import Watching


@dataclass
class System:
    """One of each; `begin` makes the node and the set ``set-1`` findable."""

    registry: Registry
    agent: AgentNode

    async def begin(self) -> None:
        """Waits until all works."""
        await self.agent.connector.connect()
        await eventually(self._begun, 15)
        self.agent.connector.retain("set-1")
        await eventually(lambda: self.finds("set-1"))

    async def finds(self, set_id: str) -> bool:
        """Looks a set up as a router does."""
        request = pb.FindBlockSetsRequest(scope="scope-1", keys=[f"key-of-{set_id}"])
        answer = await self.registry.index.FindBlockSets(request, timeout=1)
        return [pointer.set_id for pointer in answer.pointers] == [set_id]

    async def publishes(self) -> bool:
        """Retains a set and looks whether it can be found soon."""
        set_id = f"set-{uuid.uuid4().hex}"
        self.agent.connector.retain(set_id)
        deadline = time.monotonic() + 0.5
        while not await self.finds(set_id):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def listed(self) -> bool:
        """Tells whether the node is in the directory, once, and can reuse blocks."""
        answer = await self.registry.nodes.ListNodes(pb.ListNodesRequest(), timeout=1)
        return len(answer.nodes) == 1 and reuses(answer.nodes[0])

    async def watched(self) -> list[pb.Node]:
        """Returns the nodes that a new watch begins with. Raises TimeoutError when it says nothing within a second."""
        async with asyncio.timeout(1), Watching(self.registry.nodes.WatchNodes(pb.WatchNodesRequest())) as watch:
            return list((await watch.next()).snapshot.nodes)

    async def claims(self) -> bool:
        """Claims a new set."""
        set_id = f"set-{uuid.uuid4().hex}"
        self.agent.connector.retain(set_id)
        await eventually(lambda: self._held(set_id))
        await self.agent.claim(set_id, request_id=set_id)
        return True

    async def works_again(self, name: str, *, within_s: float) -> None:
        """Waits until lookups, publishes, grants and the directory work, and prints how long each took."""
        await asyncio.gather(
            recovered(f"{name}: lookups", lambda: self.finds("set-1"), within_s=within_s),
            recovered(f"{name}: publishes", self.publishes, within_s=within_s),
            recovered(f"{name}: grants", self.claims, within_s=within_s),
            recovered(f"{name}: node listed", self.listed, within_s=within_s),
        )

    async def _held(self, set_id: str) -> bool:
        return await self.agent.state(set_id) > 0

    async def _begun(self) -> bool:
        try:
            return await self.listed()
        except Exception:  # noqa: BLE001  # whatever it is, it is asked again
            return False
