"""A gateway in front of one endpoint picker, which does for each request what Envoy does with deploy/envoy/envoy.yaml.

The tests in tests/e2e/envoy have a real one do the same.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import grpc

from backhaul.envoy.v3 import access_log_pb2, access_log_pb2_grpc, ext_proc_pb2_grpc
from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul_common.grpc_client import open_channel
from tests.fakes.router_stack import CHAT, Got, chat_body

_BUFFERED = pb.ProtocolConfiguration(request_body_mode=pb.BUFFERED, response_body_mode=pb.NONE)
_REQUEST = {":method": "POST", ":path": CHAT, "content-type": "application/json"}
_REFUSED = "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_111}"
_RESET = "upstream_reset_before_response_started{connection_termination}"


class RefusalError(Exception):
    """The picker has answered in place of an engine."""

    def __init__(self, got: Got) -> None:
        super().__init__(got.status)
        self.got = got


@dataclass
class Answer:
    """An engine's, or the gateway's own."""

    status: int
    headers: dict[str, str]
    details: str
    body: aiohttp.StreamReader | None = None


class FakeGateway:
    """Sends chat turns; an async context manager."""

    def __init__(self, picker: str) -> None:
        """``picker``: host:port."""
        self._channel = open_channel(picker)
        self._client = aiohttp.ClientSession()
        self.metadata: dict[str, dict[str, Any]] = {}
        """What it says of each request, by namespace."""
        self.headers: dict[str, str] = {}
        """Headers of the requests that clients send it, besides those that all have."""
        self.call_metadata: tuple[tuple[str, str], ...] = ()
        """Metadata of its calls to the picker: where it begins a trace, of that."""
        self.log_to = picker
        """Where its access log goes."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.close()
        await self._channel.close()

    async def chat(self, *contents: str, **fields: Any) -> Got:
        """Sends a chat turn and reads the whole answer. Raises ClientPayloadError when the engine breaks it off."""
        call = ext_proc_pb2_grpc.ExternalProcessorStub(self._channel).Process(metadata=self.call_metadata)
        seen = access_log_pb2.AccessLogCommon()
        try:
            return await self._turn(call, json.dumps(chat_body(*contents, **fields)).encode(), seen)
        except RefusalError as refusal:
            return refusal.got
        except aiohttp.ClientPayloadError:
            seen.response_flags.upstream_connection_termination = True
            raise
        finally:
            # As Envoy does, whatever has happened.
            call.cancel()
            await self.log(seen)

    async def log(self, seen: access_log_pb2.AccessLogCommon) -> None:
        """Sends one entry of its access log; returns when it was taken."""
        entry = access_log_pb2.HTTPAccessLogEntry(common_properties=seen)
        logs = access_log_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[entry])
        async with open_channel(self.log_to) as channel:
            call = access_log_pb2_grpc.AccessLogServiceStub(channel).StreamAccessLogs()
            await call.write(access_log_pb2.StreamAccessLogsMessage(http_logs=logs))
            await call.done_writing()
            await call

    async def _turn(self, call: Any, body: bytes, seen: access_log_pb2.AccessLogCommon) -> Got:
        await self._ask(call, request_headers=pb.HttpHeaders(headers=_map_of({**_REQUEST, **self.headers})))
        leg = await self._ask(call, request_body=pb.HttpBody(body=body, end_of_stream=True))
        named = leg.dynamic_metadata.fields["envoy.lb"].struct_value
        seen.metadata.filter_metadata["envoy.lb"].update({**named, **self.metadata.get("envoy.lb", {})})
        began = time.monotonic()
        async with self._sent(leg) as answer:
            head = await self._ask(
                call,
                answer.details,
                response_headers=pb.HttpHeaders(headers=_map_of({":status": str(answer.status), **answer.headers})),
            )
            change = head.response_headers.response
            if change.status == pb.CommonResponse.CONTINUE_AND_REPLACE:
                headers = _changed(change)
                return Got(int(headers[":status"]), headers, change.body_mutation.body)
            assert answer.body is not None
            first = await answer.body.readany()
            seen.custom_tags["first-byte-us"] = str(round(1e6 * (time.monotonic() - began)))
            got = first + await answer.body.read()
        if head.mode_override.response_body_mode == pb.BUFFERED:
            whole = await self._ask(call, response_body=pb.HttpBody(body=got, end_of_stream=True))
            got = whole.response_body.response.body_mutation.body
        return Got(answer.status, {**answer.headers, **_changed(change)}, got)

    async def _ask(self, call: Any, details: str = "", **step: Any) -> pb.ProcessingResponse:
        message = pb.ProcessingRequest(**step, protocol_config=_BUFFERED)
        for namespace, values in self.metadata.items():
            message.metadata_context.filter_metadata[namespace].update(values)
        if details:
            message.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": details})
        await call.write(message)
        response = await call.read()
        assert response is not grpc.aio.EOF, "the picker ended its stream"
        assert isinstance(response, pb.ProcessingResponse)
        if response.HasField("immediate_response"):
            refused = response.immediate_response
            raise RefusalError(Got(refused.status.code, _set_by(refused.headers), refused.body))
        return response

    @asynccontextmanager
    async def _sent(self, leg: pb.ProcessingResponse) -> AsyncIterator[Answer]:
        """Sends a decode leg where the picker says."""
        to = leg.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"].string_value
        change = leg.request_body.response
        try:
            async with self._client.post(
                f"http://{to}{CHAT}", data=change.body_mutation.body, headers=_changed(change)
            ) as answer:
                headers = {name.lower(): value for name, value in answer.headers.items()}
                yield Answer(answer.status, headers, "via_upstream", answer.content)
        except aiohttp.ClientConnectorError:
            yield Answer(503, {}, _REFUSED)
        except aiohttp.ServerDisconnectedError:
            yield Answer(503, {}, _RESET)


def _map_of(headers: Mapping[str, str]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])


def _changed(change: pb.CommonResponse) -> dict[str, str]:
    return _set_by(change.header_mutation)


def _set_by(mutation: pb.HeaderMutation) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
