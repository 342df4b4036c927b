"""One run: a load, perhaps faults, and what came of both."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from backhaul_local.stack import Stack
from tests.soak.chaos import Chaos, Draw
from tests.soak.keeper import Keeper
from tests.soak.ledgers import Ledgers
from tests.soak.players import Players
from tests.soak.report import document
from tests.soak.tally import Tally

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a run goes."""

    seed: int
    turn_count: int
    concurrency: int = 48
    limit_s: float = 120.0
    """A turn that takes longer counts as hung."""
    fault_every_s: float = 0.0
    """Mean pause between two faults; 0: none."""


async def soak(
    stack: Stack, plan: Plan, draw: Draw | None = None, on_look: Callable[[Tally], None] = lambda tally: None
) -> dict[str, Any]:
    """Plays against a running stack and returns the report.

    ``draw`` draws faults; ``on_look`` is called once a second.
    """
    players = Players(
        routers=stack.routers,
        model=stack.model_name,
        seed=plan.seed,
        turn_count=plan.turn_count,
        concurrency=plan.concurrency,
        limit_s=plan.limit_s,
    )
    ledgers, lock = Ledgers(), asyncio.Lock()
    keeper = Keeper(stack, lock)
    chaos = (
        Chaos(stack, draw, lock, seed=plan.seed, every_s=plan.fault_every_s) if draw and plan.fault_every_s else None
    )
    begin = time.monotonic()
    async with AsyncExitStack() as exits:
        group = await exits.enter_async_context(asyncio.TaskGroup())
        done = asyncio.Event()
        watching = group.create_task(_watch(stack, ledgers, lambda: on_look(players.tally)))
        keeping = group.create_task(keeper.run())
        if chaos:
            group.create_task(chaos.run(done))
        await players.run()
        done.set()
        watching.cancel()
        keeping.cancel()
    await asyncio.to_thread(ledgers.collect, [node.url for node in stack.nodes])
    seconds = time.monotonic() - begin
    return document(
        players.tally,
        ledgers,
        settings=asdict(plan),
        seconds=seconds,
        faults=chaos.happened if chaos else [],
        missed_faults=chaos.missed if chaos else [],
        deaths=keeper.deaths,
    )


async def _watch(stack: Stack, ledgers: Ledgers, look: Callable[[], None]) -> None:
    """Asks the engines again and again: one that is killed takes its own counts with it."""
    while True:
        await asyncio.to_thread(ledgers.collect, [node.url for node in stack.nodes])
        look()
        await asyncio.sleep(_LOOK_EVERY_S)
