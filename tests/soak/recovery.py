"""How long a fault is felt: turns that fail, and time without reuse, under a steady load."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from backhaul_local.stack import Stack
from tests.soak.client import Answer
from tests.soak.faults import Fault
from tests.soak.histories import Planned
from tests.soak.ledgers import Ledgers
from tests.soak.players import Players
from tests.soak.tally import Tally

_CALM_S = 1.0
"""Time without a failure after which a fault counts as over."""
_LOOK_S = 0.05
_WATCH_S = 0.2
_FAILED, _WARM = "failed", "warm"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a fault did, seconds from its begin."""

    fault: str
    failures: dict[str, int]
    """Failed turns by what their clients were told."""
    failing_s: float
    """When the last failed turn ended; 0 when none failed."""
    without_reuse_s: float
    """Longest time between two turns that reused something."""
    held_unread_s: float = 0.0
    """For a fault of a decode node: longest time between two reads of blocks that it held."""


@dataclass(slots=True)
class Load:
    """A steady load and what has become of it so far."""

    tally: Tally
    ledgers: Ledgers = field(default_factory=Ledgers)
    marks: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, ``failed``, ``warm`` or the name of a node whose blocks were read, and what the client was told."""

    def take(self, turn: Planned, answer: Answer) -> None:
        """Notes one turn."""
        now = time.monotonic()
        if answer.outcome not in ("answered", "left"):
            self.marks.append((now, _FAILED, answer.outcome))
        elif answer.route == _WARM:
            self.marks.append((now, _WARM, ""))

    def since(self, begin: float, mark: str) -> list[tuple[float, str]]:
        """Returns times and words of marks after ``begin``."""
        return [(at, told) for at, kind, told in self.marks if kind == mark and at >= begin]


@asynccontextmanager
async def steady_load(
    stack: Stack, *, seed: int, concurrency: int = 6, pause_s: float = 0.05, limit_s: float = 60.0
) -> AsyncIterator[Load]:
    """Plays conversations until the block ends; then waits for the turns under way."""
    load: Load | None = None

    def take(turn: Planned, answer: Answer) -> None:
        assert load is not None
        load.take(turn, answer)

    players = Players(
        routers=stack.routers,
        model=stack.model_name,
        seed=seed,
        turn_count=10**9,
        concurrency=concurrency,
        pause_s=pause_s,
        limit_s=limit_s,
        on_turn=take,
    )
    load = Load(players.tally)
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(players.run())
        watching = group.create_task(_watch_holders(stack, load))
        try:
            await reach(lambda: bool(load.since(0, _WARM)), 30, "no turn is warm")
            yield load
        finally:
            players.stop()
            await asyncio.wait([playing])
            watching.cancel()


async def recovery_from(fault: Fault, stack: Stack, load: Load, *, within_s: float, holder: str = "") -> Recovery:
    """Lets a fault happen; returns once turns succeed and reuse works again, that of a holder's blocks included.

    Raises TimeoutError when that takes more than ``within_s`` seconds from the fault's begin.
    """
    begin = time.monotonic()
    await asyncio.to_thread(fault.begin, stack)
    await asyncio.sleep(fault.hold_s)
    await asyncio.to_thread(fault.end, stack)
    mended = time.monotonic()

    def over() -> bool:
        failed = load.since(begin, _FAILED)
        calm_since = max(mended, failed[-1][0] if failed else begin)
        calm = time.monotonic() - calm_since >= _CALM_S
        return calm and all(load.since(calm_since, mark) for mark in (_WARM, holder) if mark)

    await reach(over, begin + within_s - mended, f"not over after {fault.name}")
    failed = load.since(begin, _FAILED)
    told = [word for _, word in failed]
    return Recovery(
        fault=fault.name,
        failures={word: told.count(word) for word in sorted(set(told))},
        failing_s=failed[-1][0] - begin if failed else 0.0,
        without_reuse_s=_longest_gap(load, begin, _WARM),
        held_unread_s=_longest_gap(load, begin, holder) if holder else 0.0,
    )


def _longest_gap(load: Load, begin: float, mark: str) -> float:
    times = [begin, *(at for at, _ in load.since(begin, mark))]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


async def _watch_holders(stack: Stack, load: Load) -> None:
    """Marks when blocks of a decode node are read, by what its engine counts."""
    holders = [node for node in stack.nodes if node.role == "decode"]
    known: dict[str, int] = {}
    while True:
        for node in holders:
            for rank in await asyncio.to_thread(load.ledgers.collect, [node.url]):
                served = rank["reads"]["claimed"]["served"]
                if served > known.get(rank["engine_id"], 0):
                    load.marks.append((time.monotonic(), node.name, ""))
                known[rank["engine_id"]] = served
        await asyncio.sleep(_WATCH_S)


async def reach(condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
    """Waits until a condition holds. Raises TimeoutError with ``problem``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} ({timeout_s:.1f} s)")
        await asyncio.sleep(_LOOK_S)
