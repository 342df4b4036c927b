"""The router's gRPC services: its own, and the one for gateways."""

from google.protobuf import struct_pb2

from backhaul.envoy.v3 import ext_proc_pb2
from backhaul.router.v1 import router_pb2 as pb
from backhaul_router.ext_proc_service import ExternalProcessor
from backhaul_router.grpc_service import InferenceService
from tests.fuzz.routers import LIMITS, parts
from tests.fuzz.rpc import target_of

_CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
_PROMPT = b'{"model":"m","prompt":"hi"}'


def _inference() -> InferenceService:
    made = parts()
    del made["readiness"]
    return InferenceService(body_limit_bytes=LIMITS.body_bytes, send_s=5.0, **made)


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
)
