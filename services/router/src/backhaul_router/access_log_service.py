"""Learns from a gateway's access log what endpoint pickers are not told: when answers began, and which broke off.

A picker sees no bytes, and cannot tell an engine that stopped from a client that left: its stream ends either way. The
gateway can, and has nothing to say it with but its access log. Entries go to any router, not to the one that picked. So
each router learns from its share of them, as it does over HTTP.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from backhaul.envoy.v3 import access_log_pb2 as pb
from backhaul.envoy.v3 import access_log_pb2_grpc
from backhaul_router.core.engines import Failure
from backhaul_router.core.gateway import FIRST_BYTE, first_byte_s
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.routing.assembly import Routing
from backhaul_router.ext_proc_messages import expectation_of
from backhaul_router.observing import TurnObserver

Context = grpc.aio.ServicerContext[Any, Any]


class AccessLog(access_log_pb2_grpc.AccessLogServiceServicer):
    """Takes entries of decode legs, and leaves aside all others."""

    def __init__(self, *, table: NodeTable, routing: Routing, observer: TurnObserver) -> None:
        self._table = table
        self._routing = routing
        self._observer = observer
        self._streams: set[asyncio.Task[Any]] = set()

    def leave(self) -> None:
        """Ends all streams: gateways keep theirs open for ever, and send the rest elsewhere."""
        for stream in self._streams:
            stream.cancel()

    async def StreamAccessLogs(
        self, request_iterator: AsyncIterator[pb.StreamAccessLogsMessage], context: Context
    ) -> pb.StreamAccessLogsResponse:
        """Takes entries until the gateway ends the stream, or this router leaves."""
        stream = asyncio.current_task()
        assert stream is not None
        self._streams.add(stream)
        try:
            with suppress(asyncio.CancelledError):
                async for message in request_iterator:
                    for entry in message.http_logs.log_entry:
                        self._take(entry.common_properties)
        finally:
            self._streams.discard(stream)
        return pb.StreamAccessLogsResponse()

    def _take(self, seen: pb.AccessLogCommon) -> None:
        expectation = expectation_of(seen.metadata)
        node = self._table.get(expectation.node_id) if expectation is not None else None
        if expectation is None or node is None:
            return
        if not (expectation.engine_id == "" or node.engine(expectation.engine_id)):
            return
        first_s = first_byte_s(seen.custom_tags.get(FIRST_BYTE, ""))
        if expectation.stream and first_s is not None:
            self._routing.learning.told(expectation, seconds=first_s)
            self._observer.began(expectation.route, expectation.before_s + first_s, expectation.estimate_s)
        if _broken_off(seen.response_flags):
            self._observer.broken_off(node.node_id)
            self._routing.live.breakers.failed(node, Failure.DISCONNECTED)


def _broken_off(flags: pb.ResponseFlags) -> bool:
    return flags.upstream_connection_termination or flags.upstream_remote_reset or flags.upstream_protocol_error
