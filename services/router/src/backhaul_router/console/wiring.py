"""Puts the console together."""

from backhaul_common.clock import Clock
from backhaul_common.tls import Identity
from backhaul_router import configured
from backhaul_router.config import Config
from backhaul_router.console.conversations import ConversationReader
from backhaul_router.console.service import ConsoleService
from backhaul_router.console.state import ConsoleState
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.routing.live import Live
from backhaul_router.core.scopes import Scopes
from backhaul_router.owner_client import OwnerClient
from backhaul_router.registry_client import RegistryClient


def console_for(
    config: Config,
    *,
    table: NodeTable,
    live: Live,
    journal: Journal,
    registry: RegistryClient,
    owner: OwnerClient,
    scopes: Scopes,
    tenants: bool,
    clock: Clock,
    tls: Identity | None,
) -> ConsoleService | None:
    """Returns the console, if there is to be one. ``tenants``: whether there are any.

    Raises InvalidArgumentError for a key file that cannot be used.
    """
    if not config.listen_console:
        return None
    return ConsoleService(
        address=config.listen_console,
        state=ConsoleState(table=table, live=live, journal=journal, registry=registry, clock=clock, tenants=tenants),
        conversations=ConversationReader(
            registry=registry, owner=owner, table=table, journal=journal, scopes=scopes, tenants=tenants
        ),
        operators=configured.operators(config),
        clock=clock,
        tls=tls,
    )
