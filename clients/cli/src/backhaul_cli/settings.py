"""Where the services are, and what they are shown: options that every command takes."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from backhaul_common.addresses import split_address
from backhaul_common.tls.files import TlsFiles

ENVIRONMENT = "BACKHAUL_CLI"
"""Each option is also a variable: BACKHAUL_CLI_REGISTRY, BACKHAUL_CLI_TLS_CA and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a command was told."""

    registries: tuple[str, ...]
    router: str
    """Base URL."""
    router_grpc: str
    """host:port."""
    tls: TlsFiles | None
    registry_name: str
    agent_name: str
    router_name: str
    key: str
    """Tenant's key or token; empty: none."""
    timeout_s: float
    as_json: bool


class Seconds(click.FloatRange):
    """A time: a number, and none that is infinite or not a number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuses what is none."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return found


def _addresses(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    addresses = tuple(filter(None, (part.strip() for part in value.split(","))))
    if not addresses:
        raise click.BadParameter("at least one host:port is needed")
    for address in addresses:
        _address(context, parameter, address)
    return addresses


def _address(_: click.Context, __: click.Parameter, value: str) -> str:
    try:
        split_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


def _url(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise click.BadParameter("must be a URL such as http://127.0.0.1:8080")
    return value.rstrip("/")


def _variable(name: str) -> dict[str, Any]:
    return {"envvar": f"{ENVIRONMENT}_{name}", "show_envvar": True}


_OPTIONS = (
    click.option(
        "--registry",
        default="127.0.0.1:7100",
        show_default=True,
        callback=_addresses,
        metavar="HOST:PORT,...",
        help="Registry replicas; the next one is asked when one does not answer.",
        **_variable("REGISTRY"),
    ),
    click.option(
        "--router",
        default="http://127.0.0.1:8080",
        show_default=True,
        callback=_url,
        metavar="URL",
        help="A router's HTTP address.",
        **_variable("ROUTER"),
    ),
    click.option(
        "--router-grpc",
        default="127.0.0.1:8081",
        show_default=True,
        callback=_address,
        metavar="HOST:PORT",
        help="The same router's gRPC address.",
        **_variable("ROUTER_GRPC"),
    ),
    click.option(
        "--tls-ca", default="", metavar="FILE", help="CA of the services: TLS with it.", **_variable("TLS_CA")
    ),
    click.option(
        "--tls-cert", default="", metavar="FILE", help="Certificate that is shown to them.", **_variable("TLS_CERT")
    ),
    click.option("--tls-key", default="", metavar="FILE", help="Its key.", **_variable("TLS_KEY")),
    click.option(
        "--tls-registry-name",
        default="",
        metavar="NAME",
        help="Name in registries' certificates; else the host.",
        **_variable("TLS_REGISTRY_NAME"),
    ),
    click.option(
        "--tls-agent-name",
        default="",
        metavar="NAME",
        help="Name in agents' certificates; else the host.",
        **_variable("TLS_AGENT_NAME"),
    ),
    click.option(
        "--tls-router-name",
        default="",
        metavar="NAME",
        help="Name in the router's certificate, for gRPC; else the host.",
        **_variable("TLS_ROUTER_NAME"),
    ),
    click.option(
        "--key-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f"File with the tenant's key or token; or the key itself in {ENVIRONMENT}_KEY.",
        **_variable("KEY_FILE"),
    ),
    click.option(
        "--timeout-s",
        default=5.0,
        show_default=True,
        type=Seconds(min=0.1, max=600),
        help="Longest wait for one answer.",
        **_variable("TIMEOUT_S"),
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs."),
)

_NAMES = (
    "registry",
    "router",
    "router_grpc",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_registry_name",
    "tls_agent_name",
    "tls_router_name",
    "key_file",
    "timeout_s",
    "as_json",
)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options; the command gets them as its first argument, a `Settings`."""

    @wraps(command)
    def run(**options: Any) -> None:
        given = {name: options.pop(name) for name in _NAMES}
        command(_settings(given), **options)

    decorated: Callable[..., None] = run
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def _settings(given: dict[str, Any]) -> Settings:
    return Settings(
        registries=given["registry"],
        router=given["router"],
        router_grpc=given["router_grpc"],
        tls=_tls(given["tls_ca"], given["tls_cert"], given["tls_key"]),
        registry_name=given["tls_registry_name"],
        agent_name=given["tls_agent_name"],
        router_name=given["tls_router_name"],
        key=_key(given["key_file"]),
        timeout_s=given["timeout_s"],
        as_json=given["as_json"],
    )


def _tls(ca: str, cert: str, key: str) -> TlsFiles | None:
    if bool(cert) != bool(key) or (cert and not ca):
        raise click.UsageError("--tls-cert and --tls-key go together, and need --tls-ca")
    return TlsFiles(cert=cert, key=key, ca=ca) if ca else None


def _key(path: Path | None) -> str:
    """A key on the command line would be there for all to see."""

    try:
        key = path.read_text(encoding="utf-8") if path else os.environ.get(f"{ENVIRONMENT}_KEY", "")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--key-file cannot be read: {error}") from error
    if not key.strip().isascii():
        raise click.UsageError("the key is no ASCII text")
    return key.strip()
