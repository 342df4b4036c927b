"""The router's gRPC services: its own, and those for gateways."""

from typing import Any

import msgspec
from google.api.httpbody_pb2 import HttpBody
from google.protobuf import struct_pb2
from google.protobuf.duration_pb2 import Duration

from backhaul.envoy.v3 import access_log_pb2, ext_proc_pb2
from backhaul.router.v1 import conversation_pb2, gateway_pb2, http_pb2
from backhaul.router.v1 import router_pb2 as pb
from backhaul_common.clock import SystemClock
from backhaul_router.access_log_service import AccessLog
from backhaul_router.conversation_service import ConversationService
from backhaul_router.conversations import Conversations
from backhaul_router.core.expectation import expectation_in
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants
from backhaul_router.ext_proc_messages import destination
from backhaul_router.ext_proc_service import ExternalProcessor
from backhaul_router.gateway_service import GatewayService
from backhaul_router.grpc_service import InferenceService
from backhaul_router.observing import TurnObserver
from backhaul_router.planned_turns import PlannedTurns
from backhaul_router.transcoded_service import HttpApiService
from tests.fuzz.inputs import json_of
from tests.fuzz.routers import EXPECTATION, LIMITS, NODE, parts
from tests.fuzz.rpc import target_of
from tests.fuzz.target import Target
from tests.unit.router.ports import Bench
from tests.unit.router.test_conversation_service import Index
from tests.unit.router.test_conversations import Nobody

_CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
_PROMPT = b'{"model":"m","prompt":"hi"}'


def _inference() -> InferenceService:
    return InferenceService(body_limit_bytes=LIMITS.body_bytes, send_s=5.0, **parts())


def _conversations() -> ConversationService:
    bench, tenants = Bench(nodes=[NODE]), Tenants()
    conversations = Conversations(
        registry=Index(),
        owner=Nobody(),
        table=bench.table,
        tenants=tenants,
        scopes=Scopes(tenants, b""),
        clock=bench.clock,
    )
    return ConversationService(conversations, parts()["admission"], body_limit_bytes=LIMITS.body_bytes, explain=True)


def _transcoded() -> HttpApiService:
    return HttpApiService(body_limit_bytes=LIMITS.body_bytes, send_s=5.0, **parts())


class _Gateway(GatewayService):
    """Has planned a turn before each report, which calls it `TURN`."""

    def __init__(self, turns: Any, planned: PlannedTurns) -> None:
        super().__init__(turns=turns, planned=planned, body_limit_bytes=LIMITS.body_bytes)

    async def PlanTurn(self, request: gateway_pb2.PlanTurnRequest, context: Any) -> gateway_pb2.PlanTurnResponse:
        async with self._planned:
            return await super().PlanTurn(request, context)

    async def ReportTurn(self, request: gateway_pb2.ReportTurnRequest, context: Any) -> gateway_pb2.ReportTurnResponse:
        async with self._planned:
            plan = await super().PlanTurn(_PLAN, context)
            if request.turn_id == _TURN:
                sending = gateway_pb2.ReportTurnRequest.Sending()
                begun = gateway_pb2.ReportTurnRequest(turn_id=plan.turn_id, sending=sending)
                await super().ReportTurn(begun, context)
                request.turn_id = plan.turn_id
            return await super().ReportTurn(request, context)


def _gateway() -> GatewayService:
    made = parts()
    planned = PlannedTurns(
        turns=made["turns"], admission=made["admission"], clock=SystemClock(), send_s=10.0, report_s=60.0
    )
    return _Gateway(made["turns"], planned)


def _access_log() -> AccessLog:
    bench = Bench(nodes=[NODE])
    observer = TurnObserver(bench.clock, serves=bench.table.serves)
    return AccessLog(table=bench.table, routing=bench.routing, observer=observer)


def _processor() -> ExternalProcessor:
    made = parts()
    return ExternalProcessor(
        turns=made["turns"], admission=made["admission"], body_limit_bytes=LIMITS.body_bytes, receive_s=0.2
    )


def _headers(*, mode: "ext_proc_pb2.BodySendMode.ValueType", **more: str) -> ext_proc_pb2.ProcessingRequest:
    pairs = {
        ":method": "POST",
        ":path": "/v1/chat/completions",
        "content-type": "application/json",
        "x-request-id": "mine",
        **more,
    }
    values = [ext_proc_pb2.HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs.items()]
    hint = struct_pb2.Struct()
    hint.update({"x-gateway-destination-endpoint-subset": ["10.0.0.1:8200"]})
    request = ext_proc_pb2.ProcessingRequest(
        request_headers=ext_proc_pb2.HttpHeaders(headers=ext_proc_pb2.HeaderMap(headers=values)),
        protocol_config=ext_proc_pb2.ProtocolConfiguration(request_body_mode=mode),
    )
    request.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    return request


def _body(data: bytes) -> ext_proc_pb2.ProcessingRequest:
    return ext_proc_pb2.ProcessingRequest(request_body=ext_proc_pb2.HttpBody(body=data, end_of_stream=True))


def _answer(status: str) -> ext_proc_pb2.ProcessingRequest:
    values = [ext_proc_pb2.HeaderValue(key=":status", raw_value=status.encode())]
    return ext_proc_pb2.ProcessingRequest(
        response_headers=ext_proc_pb2.HttpHeaders(headers=ext_proc_pb2.HeaderMap(headers=values))
    )


_TURN = "TURN"
_PLAN = gateway_pb2.PlanTurnRequest(api=pb.API_CHAT_COMPLETIONS, body=_CHAT, session_id="s")
_HTTP_BODY = HttpBody(content_type="application/json; charset=utf-8", data=_CHAT)


def _reports() -> list[gateway_pb2.ReportTurnRequest]:
    request = gateway_pb2.ReportTurnRequest
    return [
        request(turn_id=_TURN, sending=request.Sending()),
        request(turn_id=_TURN, first_byte=request.FirstByte(after=Duration(seconds=1))),
        request(turn_id=_TURN, done=request.Done()),
        request(turn_id=_TURN, failed=request.Failed(cause=request.Failed.CAUSE_TIMEOUT)),
        request(turn_id=_TURN, failed=request.Failed(cause=request.Failed.CAUSE_STATUS, http_status=503)),
        request(turn_id=_TURN, left=request.Left()),
        request(turn_id=f"{'0' * 32}.{'1' * 32}", left=request.Left()),
    ]


def _entries() -> access_log_pb2.StreamAccessLogsMessage:
    seen = access_log_pb2.AccessLogCommon(
        custom_tags={"first-byte-us": "50000"},
        response_flags=access_log_pb2.ResponseFlags(upstream_remote_reset=True),
    )
    named = destination(NODE.endpoint, EXPECTATION).fields["envoy.lb"].struct_value
    seen.metadata.filter_metadata["envoy.lb"].CopyFrom(named)
    entry = access_log_pb2.HTTPAccessLogEntry(common_properties=seen)
    logs = access_log_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[entry, entry])
    return access_log_pb2.StreamAccessLogsMessage(http_logs=logs)


def _expectation(data: bytes) -> bool:
    found = expectation_in(data.decode(errors="surrogateescape"))
    return found is not None and expectation_in(found.told()) == found


TARGETS = (
    target_of(
        "router calls",
        pb.DESCRIPTOR.services_by_name["InferenceService"],
        _inference,
        {
            "ChatCompletions": [pb.ChatCompletionsRequest(body=_CHAT, session_id="s")],
            "Completions": [pb.CompletionsRequest(body=_PROMPT)],
            "EndConversation": [pb.EndConversationRequest(session_id="s", model="m", cache_salt="c", body=_CHAT)],
            "Explain": [pb.ExplainRequest(api=pb.API_CHAT_COMPLETIONS, body=_CHAT, session_id="s")],
            "ListModels": [pb.ListModelsRequest()],
        },
    ),
    target_of(
        "conversations",
        conversation_pb2.DESCRIPTOR.services_by_name["ConversationService"],
        _conversations,
        {
            "FindConversation": [
                conversation_pb2.FindConversationRequest(session_id="trip", model="a", cache_salt="c"),
                conversation_pb2.FindConversationRequest(session_id="trip", model="a"),
                conversation_pb2.FindConversationRequest(body=_CHAT),
            ]
        },
    ),
    target_of(
        "gateway messages",
        ext_proc_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"],
        _processor,
        {
            "Process": [
                _headers(mode=ext_proc_pb2.FULL_DUPLEX_STREAMED),
                _headers(mode=ext_proc_pb2.BUFFERED),
                _headers(mode=ext_proc_pb2.BUFFERED, authorization="Bearer key"),
                _body(_CHAT),
                _body(_CHAT),
                _answer("200"),
            ]
        },
    ),
    target_of(
        "gateway plans",
        gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"],
        _gateway,
        {"PlanTurn": [_PLAN, gateway_pb2.PlanTurnRequest(endpoints=["10.0.0.1:8200"])], "ReportTurn": _reports()},
    ),
    target_of(
        "transcoded requests",
        http_pb2.DESCRIPTOR.services_by_name["HttpService"],
        _transcoded,
        {
            "CreateChatCompletion": [http_pb2.CreateChatCompletionRequest(body=_HTTP_BODY)],
            "CreateCompletion": [
                http_pb2.CreateCompletionRequest(body=HttpBody(content_type="application/json", data=_PROMPT))
            ],
            "GetModels": [http_pb2.GetModelsRequest()],
            "DeleteConversation": [http_pb2.DeleteConversationRequest(id="s", model="m", cache_salt="c")],
        },
    ),
    target_of(
        "access logs",
        access_log_pb2.DESCRIPTOR.services_by_name["AccessLogService"],
        _access_log,
        {"StreamAccessLogs": [_entries()]},
    ),
    Target(
        "expectations in access logs",
        ("backhaul_router.core.expectation:expectation_in",),
        json_of(msgspec.json.decode(EXPECTATION.told())),
        _expectation,
    ),
)
