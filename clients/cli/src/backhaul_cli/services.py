"""Calls to registries, agents and a router. Every call has a deadline; channels are closed on exit."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.client import HTTPException
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc, diagnosis_pb2_grpc
from backhaul.registry.v1 import registry_pb2, registry_pb2_grpc
from backhaul_cli.settings import Settings
from backhaul_common.clock import time_of_day
from backhaul_common.errors import (
    BackhaulError,
    InternalError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from backhaul_common.grpc_client import CHANNEL_OPTIONS, name_options, to_error
from backhaul_common.tls.channels import channel_credentials
from backhaul_common.tls.files import Material, read_material, show

A = TypeVar("A")
B = TypeVar("B")

_AT_ONCE = 16
"""Services that are asked at the same time."""
_PAGE = 1_000
_MOST_PAGES = 100
"""Pages of block sets that are read of one agent: 100,000 sets."""
_MAX_BODY_BYTES = 64 * 1024 * 1024


class Services:
    """Everything that commands ask. Methods raise BackhaulError."""

    def __init__(self, settings: Settings) -> None:
        """Raises InvalidArgumentError for TLS files that cannot be used."""
        self._settings = settings
        self._material = read_material(settings.tls, time_of_day()) if settings.tls else None
        self._channels: dict[tuple[str, str], grpc.Channel] = {}
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    # --- registries

    def nodes(self) -> list[registry_pb2.Node]:
        """Lists the nodes, at the first registry that answers."""
        return list(
            self._at_a_registry(
                lambda channel: registry_pb2_grpc.NodeServiceStub(channel).ListNodes(
                    registry_pb2.ListNodesRequest(), timeout=self._settings.timeout_s
                )
            ).nodes
        )

    def node(self, node_id: str) -> registry_pb2.Node:
        """Returns one node. Raises NotFoundError naming those that there are."""
        nodes = self.nodes()
        found = next((node for node in nodes if node.node_id == node_id), None)
        if found is None:
            known = ", ".join(node.node_id for node in nodes) or "none"
            raise NotFoundError("NODE_UNKNOWN", f"there is no node {node_id!r} in the directory; there are: {known}")
        return found

    def registry(self, address: str) -> grpc.Channel:
        """Returns the channel to a registry."""
        return self._channel(address, self._settings.registry_name)

    def _at_a_registry(self, call: Callable[[grpc.Channel], A]) -> A:
        problem: BackhaulError | None = None
        for address in self._settings.registries:
            try:
                return _asked_of("registry", f"{address} (--registry)", partial(call, self.registry(address)))
            except UnavailableError as error:
                problem = problem or error
        where = ", ".join(self._settings.registries)
        why = problem.message if problem else "none is named"
        raise UnavailableError("REGISTRY_UNAVAILABLE", f"no registry answers at {where} (--registry): {why}")

    # --- agents

    def agent(self, address: str) -> agent_pb2_grpc.BlockSetServiceStub:
        """Returns the owner of a node's block sets."""
        return agent_pb2_grpc.BlockSetServiceStub(self.agent_channel(address))

    def agent_channel(self, address: str) -> grpc.Channel:
        """Returns the channel to an agent."""
        return self._channel(address, self._settings.agent_name)

    def diagnosis(self, address: str) -> diagnosis_pb2_grpc.DiagnosisServiceStub:
        """Returns who says how an agent is set up."""
        return diagnosis_pb2_grpc.DiagnosisServiceStub(self.agent_channel(address))

    def block_sets(self, address: str) -> list[agent_pb2.BlockSet]:
        """Lists the block sets of an owner: the first 100,000."""
        found: list[agent_pb2.BlockSet] = []
        token = ""
        for _ in range(_MOST_PAGES):
            request = agent_pb2.ListBlockSetsRequest(page_size=_PAGE, page_token=token)
            page = asked(partial(self.agent(address).ListBlockSets, request, timeout=self._settings.timeout_s))
            found += page.block_sets
            token = page.next_page_token
            if not token:
                break
        return found

    def loads(self, address: str) -> list[agent_pb2.EngineLoad]:
        """Returns what a node's engines have to do now."""

        def first() -> agent_pb2.WatchLoadResponse:
            stub = agent_pb2_grpc.LoadServiceStub(self.agent_channel(address))
            call = stub.WatchLoad(agent_pb2.WatchLoadRequest(), timeout=self._settings.timeout_s)
            try:
                return next(iter(call))
            except StopIteration:
                raise UnavailableError("NO_FIGURES", f"the agent at {address} tells no load") from None
            finally:
                call.cancel()

        return list(asked(first).engines)

    # --- the router

    def at_the_router(self, call: Callable[[grpc.Channel], A]) -> A:
        """Makes a gRPC call at the router."""
        address = self._settings.router_grpc
        channel = self._channel(address, self._settings.router_name)
        try:
            return _asked_of("router", f"{address} (--router-grpc)", partial(call, channel))
        except UnavailableError as error:
            if error.reason != "UNAVAILABLE":
                raise
            message = f"no router answers at {address} (--router-grpc): {error.message}"
            raise UnavailableError("ROUTER_UNAVAILABLE", message) from error

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What calls to the router bring: the tenant's key."""
        return (("authorization", f"Bearer {self._settings.key}"),) if self._settings.key else ()

    def http(self, path: str, body: object = None) -> tuple[int, Any]:
        """Asks the router over HTTP; returns status and JSON of its answer."""
        headers = {"content-type": "application/json", **dict(self.metadata)}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._settings.router + path, data=data, headers=headers)
        try:
            with self._opener().open(request, timeout=self._settings.timeout_s) as response:
                return response.status, document_in(response.read(_MAX_BODY_BYTES))
        except urllib.error.HTTPError as error:
            return error.code, document_in(error.read(_MAX_BODY_BYTES))
        except HTTPException as error:
            message = f"what answers at {self._settings.router} does not speak HTTP (--router)"
            raise UnavailableError("ROUTER_UNAVAILABLE", message) from error
        except (OSError, ValueError) as error:
            raise UnavailableError("ROUTER_UNAVAILABLE", f"{self._settings.router} does not answer: {error}") from error

    def _opener(self) -> urllib.request.OpenerDirector:
        # A company's proxy is not on the way to services.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirection()]
        if self._material is not None:
            handlers.append(urllib.request.HTTPSHandler(context=_context(self._material)))
        return urllib.request.build_opener(*handlers)

    # --- all

    def _channel(self, address: str, name: str) -> grpc.Channel:
        if (address, name) not in self._channels:
            self._channels[address, name] = self._exit.enter_context(self._opened(address, name))
        return self._channels[address, name]

    def _opened(self, address: str, name: str) -> grpc.Channel:
        if self._material is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        options = (*CHANNEL_OPTIONS, *name_options(name))
        return grpc.secure_channel(address, channel_credentials(self._material), options=options)


def asked(call: Callable[[], A]) -> A:
    """Makes a call. Raises BackhaulError for what gRPC says, or for something else than a service at that address."""
    try:
        return call()
    except grpc.RpcError as failure:
        raise to_error(failure) from failure
    except ValueError as error:
        # gRPC's stubs raise it for a channel that was closed, or an address that is none.
        raise InternalError("CALL_FAILED", str(error)) from error


def _asked_of(what: str, where: str, call: Callable[[], A]) -> A:
    try:
        return asked(call)
    except InternalError as error:
        if error.reason == "UNIMPLEMENTED":
            raise InternalError("WRONG_SERVICE", f"what answers at {where} is no {what}, or an older one") from error
        raise


def refused(error: BackhaulError) -> bool:
    """Tells whether a service is there, and does not let this caller in."""
    return isinstance(error, PermissionDeniedError | UnauthenticatedError)


def all_at_once(call: Callable[[A], B], items: list[A]) -> Iterator[B]:
    """Calls for each item, several at a time; results come in the order of the items."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(call, items)


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: the tenant's key would go along."""

    def redirect_request(self, *_: object) -> None:
        """Has the redirection be the answer."""


def _context(material: Material) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=material.ca.decode("ascii") or None)
    show(context, material)
    return context


def document_in(body: bytes) -> Any:
    """Returns the JSON of an answer; an empty object in place of anything else."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return {}
