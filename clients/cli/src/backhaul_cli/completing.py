"""What shells are offered for a node's name."""

import os

import click
from click.shell_completion import CompletionItem

from backhaul_cli.services import Services
from backhaul_cli.settings import ENVIRONMENT, Settings
from backhaul_common.errors import BackhaulError
from backhaul_common.tls.files import TlsFiles

_PATIENCE_S = 1.0
"""Nobody waits longer for a completion."""


def complete_node(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offers nodes of the directory; none where no registry answers within a second."""
    try:
        with Services(_settings(context)) as services:
            return [CompletionItem(node.node_id) for node in services.nodes() if node.node_id.startswith(incomplete)]
    except BackhaulError:
        return []


def _settings(context: click.Context) -> Settings:
    """Takes what was typed so far, else the environment: completion runs no callbacks."""

    def told(name: str, default: str = "") -> str:
        return str(context.params.get(name) or os.environ.get(f"{ENVIRONMENT}_{name.upper()}") or default)

    registry = context.params.get("registry")
    addresses = registry if isinstance(registry, tuple) else told("registry", "127.0.0.1:7100").split(",")
    ca = told("tls_ca")
    return Settings(
        registries=tuple(filter(None, addresses)),
        router="",
        router_grpc="",
        tls=TlsFiles(ca=ca, cert=told("tls_cert"), key=told("tls_key")) if ca else None,
        registry_name=told("tls_registry_name"),
        agent_name="",
        router_name="",
        key="",
        timeout_s=_PATIENCE_S,
        as_json=False,
    )
