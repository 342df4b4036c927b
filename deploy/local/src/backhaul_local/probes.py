"""Readiness of what runs here, asked once and without raising."""

import http.client
import ssl
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2


def http_ready(url: str, context: ssl.SSLContext | None = None) -> bool:
    """Whether a GET answers 200."""
    try:
        with _opener(context).open(url, timeout=_TIMEOUT_S) as response:
            return bool(response.status == http.client.OK)
    except (OSError, http.client.HTTPException):
        return False


def _opener(context: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def grpc_ready(address: str, credentials: grpc.ChannelCredentials | None = None) -> bool:
    """Whether the server at ``address`` says SERVING."""
    options = [("grpc.enable_http_proxy", 0)]
    secure = credentials and grpc.secure_channel(address, credentials, options=options)
    with secure or grpc.insecure_channel(address, options=options) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
