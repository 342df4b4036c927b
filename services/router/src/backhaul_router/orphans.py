"""Looks after nodes whose agent is gone: they serve on for as long as their engine answers."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_router.core.nodes import Node, NodeTable

_log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
"""Between two looks at the orphaned engines, seconds."""


class Health(Protocol):
    """Engines that say whether they are well."""

    async def healthy(self, url: str) -> bool:
        """Never raises; bounded in time."""
        ...


async def watch_orphans(table: NodeTable, health: Health, clock: Clock, on_change: Callable[[], None]) -> None:
    """Drops orphaned nodes whose engine does not answer, until cancelled."""
    known: set[str] = set()
    while True:
        orphans = table.orphans
        for node in orphans:
            if node.node_id not in known:
                _log.warning("agent gone, engine serves on without reuse", node_id=node.node_id)
        answers = await asyncio.gather(*(health.healthy(f"{node.engine_url}/health") for node in orphans))
        dead = [node for node, healthy in zip(orphans, answers, strict=True) if not healthy]
        _drop(table, dead)
        if dead:
            on_change()
        known = {node.node_id for node in orphans}
        await clock.sleep(INTERVAL_S)


def _drop(table: NodeTable, dead: list[Node]) -> None:
    for node in dead:
        _log.warning("engine without agent does not answer, node dropped", node_id=node.node_id)
        table.drop_orphan(node.node_id)
