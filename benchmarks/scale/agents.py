"""A node agent as in `backhaul_node_agent.app`, without what asks the engine: the connector's word is enough."""

import asyncio
from typing import Any

from backhaul.agent.v1.agent_pb2_grpc import add_BlockSetServiceServicer_to_server, add_LoadServiceServicer_to_server
from backhaul.registry.v1 import registry_pb2
from backhaul_common.clock import Clock
from backhaul_common.durations import duration
from backhaul_connector import wire
from backhaul_node_agent.agent import Agent
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.engine_loads import EngineLoad
from backhaul_node_agent.core.life import Limits
from backhaul_node_agent.core.owner import Owner
from backhaul_node_agent.load_service import LoadServicer
from backhaul_node_agent.load_watch import LoadWatch
from backhaul_node_agent.node_session import NodeSession
from backhaul_node_agent.publishers import Publishers
from backhaul_node_agent.registries import Registries
from backhaul_node_agent.service import BlockSetServicer
from benchmarks.routing.clusters import BLOCK_SIZE
from benchmarks.scale.engines import TTL_S, VirtualEngine
from benchmarks.scale.meter import OTHERS, Meter
from benchmarks.scale.wire import Network

AGENT, AGENT_IDLE = "agent", "agent, idle"
"""Accounts: what turns cost, and what time costs."""

_TICK_S, _PING_S = 0.2, 1.0
_LEASE_TTL_S, _LEASE_MARGIN_S = 10.0, 0.5


class Node:
    """An engine and its agent."""

    def __init__(
        self, engine: VirtualEngine, role: str, *, registry: str, network: Network, clock: Clock, meter: Meter
    ) -> None:
        self._engine = engine
        self._role = role
        self._clock = clock
        self._meter = meter
        self._owner = Owner(session=f"session-{engine.node_id}", limits=Limits())
        self._session = NodeSession(
            registries=Registries([registry], connect=network.connect),  # type: ignore[arg-type]  # as stubs need it
            ttl_s=_LEASE_TTL_S,
            margin_s=_LEASE_MARGIN_S,
            clock=clock,
            on_taken=lambda: None,
        )
        self._publishers = Publishers(
            registries=Registries([registry], connect=network.connect),  # type: ignore[arg-type]  # as stubs need it
            node_id=engine.node_id,
            clock=clock,
            joined=self._session.joined,
        )
        self._agent = Agent(
            owner=self._owner,
            clock=clock,
            connectors=_Connectors(),
            index=_Index(self._publishers),
            notifier=_Notifier(self),
            on_change=lambda: None,
        )
        self._loads = LoadWatch(self._load, clock)
        unused: Any = None
        server: Any = network.serve(self.address, AGENT, idle=AGENT_IDLE)
        add_BlockSetServiceServicer_to_server(
            BlockSetServicer(self._agent, unused, unused, drain_timeout_s=60.0), server
        )
        add_LoadServiceServicer_to_server(LoadServicer(self._loads), server)
        engine.hear = self.hear

    @property
    def address(self) -> str:
        """Where the agent listens."""
        return f"agent-{self._engine.node_id}"

    @property
    def set_count(self) -> int:
        """Block sets that it owns."""
        return self._owner.set_count

    def hear(self, event: ev.Event) -> None:
        """The agent takes in what its engine's connector says, and pays for that."""
        with self._meter.paying(AGENT):
            self._agent.hear(event)

    async def run(self) -> None:
        """Runs the agent until cancelled."""
        engine = self._engine
        self.hear(ev.EngineConnected(1, engine.facts, ""))
        self.hear(ev.ReplayFinished(1, engine.engine_id))
        self._ping()
        self._session.update(self._record())
        async with asyncio.TaskGroup() as group:
            with self._meter.paying(AGENT):
                group.create_task(self._publishers.run(self._agent.hear))
            with self._meter.paying(AGENT_IDLE):
                group.create_task(self._session.run(self._agent.hear))
                group.create_task(self._tick())

    async def _tick(self) -> None:
        due = 0.0
        while True:
            if self._clock.monotonic() >= due:
                due = self._clock.monotonic() + _PING_S
                self._ping()
            for event in (ev.TimePassed(), ev.RetentionDue()):
                self._agent.hear(event)
            self._loads.tick()
            await self._clock.sleep(_TICK_S)

    def _ping(self) -> None:
        engine, now = self._engine, self._clock.monotonic()
        self._agent.hear(ev.ClockObserved(1, engine.engine_id, now, now, now))
        self._agent.hear(ev.MemorySeen(1, engine.engine_id, engine.free_blocks, engine.waiting))

    def _load(self, _: float) -> tuple[EngineLoad, ...]:
        engine, blocks = self._engine, self._engine.speed.block_count
        retention = self._owner.retention(engine.engine_id)
        used = 1 - engine.free_blocks / blocks
        load = EngineLoad(engine.engine_id, engine.running, engine.waiting, used, engine.free_blocks, retention)
        return (load,)

    def _record(self) -> registry_pb2.Node:
        engine = self._engine
        role = registry_pb2.ROLE_PREFILL if self._role == "prefill" else registry_pb2.ROLE_DECODE
        facts = registry_pb2.Engine(
            engine_id=engine.engine_id,
            compatibility_hash="h",
            weights_digest="w",
            block_size=BLOCK_SIZE,
            block_count=engine.speed.block_count,
            retention_ttl=duration(TTL_S),
            connector_version="1",
            reuse=True,
            vllm_version="0.32.0",
            tp_size=1,
        )
        return registry_pb2.Node(
            node_id=engine.node_id,
            session=f"session-{engine.node_id}",
            role=role,
            agent_address=self.address,
            engine_url=f"http://{engine.node_id}:8000",
            models=["m"],
            engines=[facts],
            state=registry_pb2.NODE_STATE_READY,
        )

    def released(self, set_ids: tuple[str, ...]) -> None:
        """The engine was told to free sets."""
        asyncio.get_running_loop().call_soon(self._free, set_ids)

    def renewed(self, set_ids: tuple[str, ...]) -> None:
        """The engine was asked for more time."""
        until = dict.fromkeys(set_ids, self._clock.monotonic() + 2 * self._engine.facts.lease_s / 3)
        asyncio.get_running_loop().call_soon(self.hear, ev.DeadlinesConfirmed(1, self._engine.engine_id, until))

    def _free(self, set_ids: tuple[str, ...]) -> None:
        with self._meter.paying(OTHERS):
            self._engine.free(set_ids)


class _Connectors:
    """The connection to the engine's connector: it is there and quick."""

    def tell(self, engine_id: str, message: wire.Claimed | wire.Returned) -> None:
        """Says it."""

    async def flushed(self, engine_id: str, timeout_s: float) -> bool:
        """It has been taken."""
        return True


class _Index:
    """The publishers, as the agent's centre sees them (`backhaul_node_agent.index`)."""

    def __init__(self, publishers: Publishers) -> None:
        self.open = publishers.open
        self.publish = publishers.publish
        self.unpublish = publishers.unpublish
        self.forget = publishers.forget
        self.lease_lost = publishers.lease_lost

    def let_go(self, engine_id: str, block_set: BlockSet) -> None:
        """Nobody here gives second chances."""


class _Notifier:
    """NIXL: what is sent arrives."""

    available = True
    starting = False

    def __init__(self, node: Node) -> None:
        self._node = node

    def send(self, effect: ev.SendRelease | ev.SendRenewal) -> None:
        """Sends it."""
        if isinstance(effect, ev.SendRelease):
            self._node.released((effect.set_id,))
        else:
            self._node.renewed(effect.set_ids)

    def forget(self, engine_id: str) -> None:
        """Nothing is remembered."""
