"""Follows what agents tell of their engines' load: one stream for each listed node."""

import asyncio
import random
from dataclasses import dataclass

import grpc
import structlog

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_common.clock import Clock
from backhaul_common.grpc_client import Connect, open_channel, to_error
from backhaul_router.convert import load_reports_from
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.routing.reports import Reports

_log = structlog.get_logger(__name__)

INTERVAL_S = 0.25
"""Between two looks at which nodes are listed, seconds."""

SILENCE_S = 5.0
"""Without a message for this long a stream is dead: agents promise one every second."""

UNSUPPORTED_S = 60.0
"""Until an agent is asked again that does not know how to tell; one that starts anew is asked at once."""

_UNSUPPORTED = "the agent is too old to tell its engines' load"

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Source:
    """Whom to ask: another process is another source."""

    address: str
    session: str


class LoadReports:
    """Keeps the reports of all nodes up to date. Those of agents that cannot be reached grow old by themselves.

    Run `run` in a task. Each stream has a channel of its own: the end of a node then ends them both at once, and calls
    to owners have nothing to do with it.
    """

    def __init__(self, table: NodeTable, reports: Reports, clock: Clock, *, connect: Connect = open_channel) -> None:
        self._table = table
        self._reports = reports
        self._clock = clock
        self._connect = connect
        self._streams: dict[str, tuple[_Source, asyncio.Task[None]]] = {}
        self._missing: set[str] = set()
        """Nodes without a working stream; logged when it changes."""

    async def run(self) -> None:
        """Follows the node table until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._look(group)
                await self._clock.sleep(INTERVAL_S)

    def _look(self, group: asyncio.TaskGroup) -> None:
        """Ends the streams to agents that have left or started anew, and begins those that are wanted."""
        sources = {node.node_id: _Source(node.agent_address, node.session) for node in self._table if not node.orphaned}
        gone = self._streams.keys() - sources.keys()
        self._reports.drop(gone)
        self._missing -= gone
        for node_id in [node_id for node_id, (source, _) in self._streams.items() if sources.get(node_id) != source]:
            self._streams.pop(node_id)[1].cancel()
        for node_id in sources.keys() - self._streams.keys():
            source = sources[node_id]
            self._streams[node_id] = source, group.create_task(self._keep(node_id, source.address))

    async def _keep(self, node_id: str, address: str) -> None:
        """Watches one agent again and again."""
        pause = _FIRST_PAUSE_S
        async with self._connect(address) as channel:
            while True:
                told, problem = await self._follow(node_id, channel)
                if node_id not in self._missing:
                    self._missing.add(node_id)
                    _log.info("load reports missing", node_id=node_id, reason=problem)
                if problem == _UNSUPPORTED:
                    await self._clock.sleep(UNSUPPORTED_S)
                    continue
                pause = _FIRST_PAUSE_S if told else min(2 * pause, _LONGEST_PAUSE_S)
                await self._clock.sleep(pause * random.uniform(0.5, 1.0))

    async def _follow(self, node_id: str, channel: grpc.aio.Channel) -> tuple[bool, str]:
        """Takes reports until the stream ends. Returns whether there was one, and why it ended."""
        told = False
        call = agent_pb2_grpc.LoadServiceStub(channel).WatchLoad(agent_pb2.WatchLoadRequest())
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    message = await call.read()
                if not isinstance(message, agent_pb2.WatchLoadResponse):
                    return told, "the agent ended the watch"
                self._reports.take_all(node_id, load_reports_from(message))
                told = True
                if node_id in self._missing:
                    self._missing.discard(node_id)
                    _log.info("load reports restored", node_id=node_id)
        except grpc.aio.AioRpcError as error:
            unsupported = error.code() is grpc.StatusCode.UNIMPLEMENTED
            return told, _UNSUPPORTED if unsupported else str(to_error(error))
        except TimeoutError:
            return told, f"silence for {SILENCE_S:g} s"
        except Exception as error:  # noqa: BLE001  # the task border: one agent must not end the reports of all
            _log.error("load reports failed unexpectedly", node_id=node_id, exc_info=error)
            return told, "unexpected"
        finally:
            call.cancel()
