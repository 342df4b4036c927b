"""Looks after nodes whose agent is gone: they serve on for as long as their engine answers."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_router.core.engines import Failure
from backhaul_router.core.nodes import Node, NodeTable

_log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
"""Between two looks at the orphaned engines, seconds."""

TIMEOUTS_IN_A_ROW = 3
"""Which end an orphan; a busy engine answers late now and then. Any other failure ends it at once."""


class Health(Protocol):
    """Engines that say whether they are well."""

    async def health_failure(self, url: str) -> Failure | None:
        """Returns None for one that is well. Never raises; bounded in time."""
        ...


async def watch_orphans(table: NodeTable, health: Health, clock: Clock, on_change: Callable[[], None]) -> None:
    """Drops orphaned nodes whose engine does not answer, until cancelled."""
    strikes: dict[str, int] = {}
    while True:
        orphans = table.orphans
        for node in orphans:
            if node.node_id not in strikes:
                _log.warning("agent gone, engine serves on without reuse", node_id=node.node_id)
        failures = await asyncio.gather(*(health.health_failure(f"{node.engine_url}/health") for node in orphans))
        strikes = {
            node.node_id: _strikes(strikes.get(node.node_id, 0), failure)
            for node, failure in zip(orphans, failures, strict=True)
        }
        dead = [node for node in orphans if strikes[node.node_id] >= TIMEOUTS_IN_A_ROW]
        _drop(table, dead)
        if dead:
            on_change()
        await clock.sleep(INTERVAL_S)


def _strikes(before: int, failure: Failure | None) -> int:
    if failure is None:
        return 0
    return before + 1 if failure is Failure.TIMEOUT else TIMEOUTS_IN_A_ROW


def _drop(table: NodeTable, dead: list[Node]) -> None:
    for node in dead:
        _log.warning("engine without agent does not answer, node dropped", node_id=node.node_id)
        table.drop_orphan(node.node_id)
