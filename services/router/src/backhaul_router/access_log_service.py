"""Takes from a gateway's access log what endpoint pickers are not told: which engines broke off an answer.

A picker cannot tell an engine that stopped from a client that left: its stream ends either way. The gateway can, but
has nothing to say it with besides its access log, and is to log such answers only. Entries go to any router, not to the
one that picked. So each router knows its share of what engines do wrong, as it does over HTTP.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from backhaul.envoy.v3 import access_log_pb2 as pb
from backhaul.envoy.v3 import access_log_pb2_grpc
from backhaul_router.core.engines import Failure
from backhaul_router.core.health.breakers import Breakers
from backhaul_router.core.nodes import NodeTable
from backhaul_router.ext_proc_messages import node_in

_log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class AccessLog(access_log_pb2_grpc.AccessLogServiceServicer):
    """Counts answers that engines broke off, against their nodes."""

    def __init__(self, *, table: NodeTable, breakers: Breakers) -> None:
        self._table = table
        self._breakers = breakers

    async def StreamAccessLogs(
        self, request_iterator: AsyncIterator[pb.StreamAccessLogsMessage], context: Context
    ) -> pb.StreamAccessLogsResponse:
        """Takes entries until the gateway ends the stream."""
        async for message in request_iterator:
            for entry in message.http_logs.log_entry:
                self._broken(node_in(entry.common_properties.metadata))
        return pb.StreamAccessLogsResponse()

    def _broken(self, node_id: str) -> None:
        node = self._table.get(node_id)
        if node is None:
            return
        _log.warning("an engine broke off an answer", node=node_id)
        self._breakers.failed(node, Failure.DISCONNECTED)
