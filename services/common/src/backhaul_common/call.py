"""Calls one method of a service and prints what it answers: ``python -m backhaul_common.call ADDRESS SERVICE/METHOD``.

Does for those who have these packages what grpcurl does for all.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from backhaul_common.addresses import split_address
from backhaul_common.clock import time_of_day
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.grpc_client import CHANNEL_OPTIONS, name_options, to_error
from backhaul_common.tls.channels import channel_credentials
from backhaul_common.tls.files import TlsFiles, read_material

_APIS = (
    *(f"backhaul.{area}.v1.{area}_pb2" for area in ("agent", "registry", "router")),
    "backhaul.agent.v1.diagnosis_pb2",
    "backhaul.registry.v1.diagnosis_pb2",
    "backhaul.router.v1.conversation_pb2",
    "backhaul.router.v1.gateway_pb2",
    "backhaul.router.v1.http_pb2",
    "grpc_health.v1.health_pb2",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints each answer as JSON; exits with 2 for a call that cannot be made, with 1 for one that fails."""
    parser = argparse.ArgumentParser("python -m backhaul_common.call", description="Calls one gRPC method.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("method", help="such as backhaul.registry.v1.NodeService/ListNodes")
    parser.add_argument("request", nargs="?", default="{}", help="JSON of the request (bytes in base64); default: {}")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="metadata of the call")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="default: 10")
    parser.add_argument("--tls-ca", default="", metavar="FILE", help="CA of the service's certificate; TLS with it")
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="certificate of whoever calls")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="its key")
    parser.add_argument(
        "--tls-name", default="", metavar="NAME", help="name in the service's certificate; else the host"
    )
    options = parser.parse_args(arguments)
    try:
        split_address(options.address)
        method = _method(options.method)
        request = json_format.Parse(options.request, GetMessageClass(method.input_type)())
        headers = [_header(text) for text in options.header]
        channel = _channel(options)
    except (ValueError, json_format.ParseError) as error:
        parser.error(str(error))
    except InvalidArgumentError as error:
        parser.error(error.message)
    try:
        with channel:
            for answer in _answers(channel, method, request, timeout=options.timeout_s, metadata=headers):
                sys.stdout.write(f"{json_format.MessageToJson(answer, always_print_fields_with_no_presence=True)}\n")
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except grpc.RpcError as failure:
        told = to_error(failure)
        sys.exit(f"{failure.code().name} ({told.reason}): {told.message}")


def _channel(options: argparse.Namespace) -> grpc.Channel:
    """Raises ValueError or InvalidArgumentError for files that cannot be used."""
    if bool(options.tls_cert) != bool(options.tls_key) or (options.tls_cert and not options.tls_ca):
        raise ValueError("--tls-cert and --tls-key go together, and need --tls-ca")
    if not options.tls_ca:
        return grpc.insecure_channel(options.address, options=CHANNEL_OPTIONS)
    files = TlsFiles(cert=options.tls_cert, key=options.tls_key, ca=options.tls_ca)
    credentials = channel_credentials(read_material(files, time_of_day()))
    return grpc.secure_channel(
        options.address, credentials, options=(*CHANNEL_OPTIONS, *name_options(options.tls_name))
    )


def _method(path: str) -> MethodDescriptor:
    """Finds a method. Raises ValueError naming what there is."""
    for name in _APIS:
        importlib.import_module(name)
    service, _, name = path.partition("/")
    try:
        found = descriptor_pool.Default().FindServiceByName(service)
    except KeyError:
        known = ", ".join(sorted(full_name for api in _APIS for full_name in _services(api)))
        raise ValueError(f"no service {service!r}; there are {known}") from None
    if name not in found.methods_by_name:
        raise ValueError(f"{service} has no method {name!r}; it has {', '.join(found.methods_by_name)}")
    method = found.methods_by_name[name]
    if method.client_streaming:
        raise ValueError(f"{path} takes a stream, and only one request can be sent")
    return method


def _services(api: str) -> Iterator[str]:
    services = importlib.import_module(api).DESCRIPTOR.services_by_name.values()
    return (service.full_name for service in services)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise ValueError(f"a header is NAME:VALUE, not {text!r}")
    return name.strip().lower(), value.strip()


def _answers(channel: grpc.Channel, method: MethodDescriptor, request: Message, **options: Any) -> Iterator[Message]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    call: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
    answer = GetMessageClass(method.output_type).FromString
    got = call(path, type(request).SerializeToString, answer)(request, **options)
    return got if method.server_streaming else iter([got])


if __name__ == "__main__":
    main()
