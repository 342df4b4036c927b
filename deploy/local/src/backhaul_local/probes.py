"""Readiness of what runs here, asked once and without raising."""

import http.client
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 2

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def http_ready(url: str) -> bool:
    """Whether a GET answers 200."""
    try:
        with _opener.open(url, timeout=_TIMEOUT_S) as response:
            return bool(response.status == http.client.OK)
    except (OSError, http.client.HTTPException):
        return False


def grpc_ready(address: str) -> bool:
    """Whether the server at ``address`` says SERVING."""
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
