"""A router's gRPC servers: of clients, of endpoint pickers, of gateways that plan turns."""

from backhaul.envoy.v3 import access_log_pb2_grpc, ext_proc_pb2_grpc
from backhaul.router.v1 import conversation_pb2_grpc, gateway_pb2_grpc, http_pb2_grpc, router_pb2_grpc
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import Identity
from backhaul_router.access_log_service import AccessLog
from backhaul_router.config import Config
from backhaul_router.conversation_service import SERVICE_NAME as CONVERSATION_NAME
from backhaul_router.conversation_service import ConversationService
from backhaul_router.ext_proc_service import HEALTH_NAMES, ExternalProcessor
from backhaul_router.ext_proc_service import SERVICE_NAME as EXT_PROC_NAME
from backhaul_router.gateway_service import SERVICE_NAME as GATEWAY_NAME
from backhaul_router.gateway_service import GatewayService
from backhaul_router.grpc_service import SERVICE_NAME, InferenceService
from backhaul_router.transcoded_service import SERVICE_NAME as HTTP_NAME
from backhaul_router.transcoded_service import HttpApiService

_FRAME_BYTES = 1024 * 1024
"""What a gRPC message may hold besides the body."""
_IDLE_S = 300.0
"""How long a client's connection may be without a call. Clients connect again for the next one."""


def client_server(
    config: Config,
    inference: InferenceService,
    http_api: HttpApiService,
    conversations: ConversationService,
    tls: Identity | None,
) -> GrpcServer:
    """Returns the server of clients."""
    server = GrpcServer(
        address=config.listen_grpc,
        service_names=(SERVICE_NAME, HTTP_NAME, CONVERSATION_NAME),
        max_message_bytes=int(config.body_limit) + _FRAME_BYTES,
        max_calls=2 * config.max_turns + config.max_queued,
        max_connections=config.max_connections,
        receive_s=config.receive_timeout_s,
        idle_s=_IDLE_S,
        tls=tls,
    )
    router_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server.server)
    http_pb2_grpc.add_HttpServiceServicer_to_server(http_api, server.server)
    conversation_pb2_grpc.add_ConversationServiceServicer_to_server(conversations, server.server)
    return server


def picker_server(
    config: Config, picker: ExternalProcessor, access_log: AccessLog, tls: Identity | None
) -> GrpcServer | None:
    """Returns the server of the endpoint picker, if there is to be one."""
    if not config.listen_ext_proc:
        return None
    server = GrpcServer(
        address=config.listen_ext_proc,
        service_names=(EXT_PROC_NAME,),
        health_names=HEALTH_NAMES,
        max_message_bytes=max(int(config.body_limit), int(config.answer_limit)) + _FRAME_BYTES,
        max_calls=2 * config.max_turns + config.max_queued,
        receive_s=config.receive_timeout_s,
        tls=tls,
        callers=config.tls_callers,
    )
    ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, server.server)
    access_log_pb2_grpc.add_AccessLogServiceServicer_to_server(access_log, server.server)
    return server


def gateway_server(config: Config, gateway: GatewayService, tls: Identity | None) -> GrpcServer | None:
    """Returns the server for gateways that plan turns, if there is to be one."""
    if not config.listen_gateway:
        return None
    server = GrpcServer(
        address=config.listen_gateway,
        service_names=(GATEWAY_NAME,),
        # What goes to an engine is the client's body and a little more.
        max_message_bytes=int(config.body_limit) + _FRAME_BYTES,
        max_calls=2 * config.max_turns + config.max_queued,
        receive_s=config.receive_timeout_s,
        tls=tls,
        callers=config.tls_callers,
    )
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(gateway, server.server)
    return server
