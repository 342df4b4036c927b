"""What a router's configuration and the files that it names say, as its parts take it."""

from pathlib import Path

from backhaul_common.errors import InvalidArgumentError
from backhaul_common.tls import Identity, TlsFiles
from backhaul_router.config import Config
from backhaul_router.core.console.operators import Operators, parse_operators
from backhaul_router.core.routing.planner import RoutePolicy
from backhaul_router.core.routing.settings import RoutingSettings, parse_routing
from backhaul_router.core.tenants import Tenants
from backhaul_router.core.turn import Route
from backhaul_router.engine_client import EngineTimeouts
from backhaul_router.http_protocol import ClientLimits
from backhaul_router.ports import Policy
from backhaul_router.tenants_file import TenantsFile

_MIN_CLUSTER_KEY_BYTES = 16


def identity(name: str, files: TlsFiles | None) -> Identity | None:
    """Returns what a service shows and trusts by these files; None without any."""
    return Identity(name, files) if files else None


def timeouts(config: Config) -> EngineTimeouts:
    """Returns the limits of legs."""
    return EngineTimeouts(
        connect_s=config.connect_timeout_s,
        prefill_s=config.prefill_timeout_s,
        warm_prefill_s=config.warm_prefill_timeout_s,
        first_byte_s=config.first_byte_timeout_s,
        idle_s=config.idle_timeout_s,
    )


def client_limits(config: Config) -> ClientLimits:
    """Returns the limits of HTTP clients."""
    return ClientLimits(
        body_bytes=int(config.body_limit),
        receive_s=config.receive_timeout_s,
        send_s=config.send_timeout_s,
        connections=config.max_connections,
        goodbyes=config.goodbyes,
    )


def tenants(config: Config) -> Tenants | TenantsFile:
    """Returns who may call. Raises InvalidArgumentError (BAD_TENANTS_FILE)."""
    try:
        return TenantsFile(config.tenants_file) if config.tenants_file else Tenants()
    except ValueError as error:
        raise InvalidArgumentError("BAD_TENANTS_FILE", str(error)) from error


def cluster_key(config: Config) -> bytes:
    """Returns the secret that tenants' salts are made with. Raises InvalidArgumentError (NO_CLUSTER_KEY)."""
    cluster_key = _read(config.cluster_key_file).strip() if config.cluster_key_file else b""
    if config.tenants_file and len(cluster_key) < _MIN_CLUSTER_KEY_BYTES:
        raise InvalidArgumentError(
            "NO_CLUSTER_KEY", f"tenants need cluster_key_file, with at least {_MIN_CLUSTER_KEY_BYTES} bytes in it"
        )
    return cluster_key


def policy(config: Config) -> Policy:
    """Returns what turns may do. Raises InvalidArgumentError (FILE_UNREADABLE)."""
    engine_key = _read(config.engine_key_file).decode().strip() if config.engine_key_file else ""
    return Policy(
        prefill_fallback=config.prefill_fallback,
        keep_constraints=tuple(part.lower() for part in config.keep_constraints),
        engine_key=engine_key,
        explain=config.explain,
    )


def operators(config: Config) -> Operators:
    """Returns who may look at the console. Raises InvalidArgumentError (BAD_CONSOLE_KEY_FILE, FILE_UNREADABLE)."""
    if not config.console_key_file:
        return Operators()
    try:
        return parse_operators(_read(config.console_key_file).decode())
    except ValueError as error:
        raise InvalidArgumentError("BAD_CONSOLE_KEY_FILE", f"{config.console_key_file}: {error}") from error


def route_policy(config: Config) -> RoutePolicy:
    """Returns which routes may be taken."""
    return RoutePolicy(
        routes=frozenset(map(Route, config.routes)),
        prefer=None if config.prefer == "auto" else Route(config.prefer),
        decode_computes=config.prefill_fallback == "decode",
    )


def routing_settings(config: Config) -> RoutingSettings:
    """Returns how engines are chosen. Raises InvalidArgumentError (BAD_ROUTING_FILE)."""
    if not config.routing_file:
        return RoutingSettings()
    try:
        return parse_routing(_read(config.routing_file).decode())
    except ValueError as error:
        raise InvalidArgumentError("BAD_ROUTING_FILE", f"{config.routing_file}: {error}") from error


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError("FILE_UNREADABLE", f"{path}: {error.strerror}") from error
