"""Plays turns over one way, and takes the time of what comes."""

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.overhead.engine import MODEL
from benchmarks.overhead.ways import TurnError, Way

PROMPT = "hello " * 500
"""About 3 KB, 500 tokens."""

_SENT = re.compile(rb'"created":(\d+)')
_END = b"data: [DONE]"
_SETTLED = 3
"""Pieces of each stream before a window opens."""
_BEGIN_S = 2.0
"""For all streams to begin."""

_LIMIT_S = 30.0

Cpu = Callable[[], Mapping[str, float]]
"""CPU seconds of each process until now."""


@dataclass(slots=True)
class Seen:
    """What one window showed."""

    seconds: float = 0.0
    count: int = 0
    """Turns that ended, or events that came, in it."""
    times_s: list[float] = field(default_factory=list)
    """To the first byte of each turn, or from sending to receiving of each event."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By process."""
    failures: list[str] = field(default_factory=list)


def body(tokens: int, gap_s: float = 0.0, history: str = "") -> dict[str, Any]:
    """Returns a turn's body; with a ``history`` it goes on with a conversation."""
    before = [{"role": "user", "content": history}, {"role": "assistant", "content": history}] if history else []
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [*before, {"role": "user", "content": PROMPT}],
        "stream": True,
        "max_tokens": tokens,
    }
    return {**asked, "vllm_xargs": {"gap_s": gap_s}} if gap_s else asked


async def short_turns(way: Way, sent: Mapping[str, Any], *, streams: int, seconds: float, cpu: Cpu) -> Seen:
    """Plays turns one after the other in each of so many streams, for so long."""
    seen = Seen()
    before, began = cpu(), time.perf_counter()

    async def one_after_the_other() -> None:
        while time.perf_counter() < began + seconds:
            sent_at, times = time.perf_counter(), list[float]()
            if await _play(way, sent, seen, lambda _: times.append(time.perf_counter())):  # noqa: B023  # awaited here
                seen.times_s.append(times[0] - sent_at)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(one_after_the_other())
    seen.seconds, seen.cpu_s = time.perf_counter() - began, _spent(before, cpu())
    seen.count = len(seen.times_s)
    return seen


async def long_streams(way: Way, *, streams: int, gap_s: float, seconds: float, cpu: Cpu) -> Seen:
    """Opens so many streams of one event each ``gap_s`` seconds; looks at them for so long once all have begun."""
    seen, window = Seen(), _Window(streams)
    # Long enough for all to begin, and for the window.
    sent = body(round((seconds + _BEGIN_S) / gap_s), gap_s)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(_play(way, sent, seen, window.stream()))
        # Those that do not begin have failed, and are told of.
        with suppress(TimeoutError):
            await asyncio.wait_for(window.all_begun.wait(), _LIMIT_S)
        before, began = cpu(), time.perf_counter()
        window.delays_s = seen.times_s
        await asyncio.sleep(seconds)
        window.delays_s = []
        seen.seconds, seen.cpu_s = time.perf_counter() - began, _spent(before, cpu())
        seen.count = len(seen.times_s)
    return seen


class _Window:
    """The time in which the events of streams count."""

    def __init__(self, streams: int) -> None:
        self._waiting = streams
        self.all_begun = asyncio.Event()
        self.delays_s: list[float] = []
        """Of the events that come, from their sending on."""

    def stream(self) -> Callable[[bytes], None]:
        """Returns what takes the pieces of one stream."""
        counts = itertools.count(1)

        def take(piece: bytes) -> None:
            now = time.monotonic_ns()
            if next(counts) == _SETTLED:
                self._waiting -= 1
                if not self._waiting:
                    self.all_begun.set()
            self.delays_s += [(now - int(sent)) / 1e9 for sent in _SENT.findall(piece)]

        return take


async def _play(way: Way, sent: Mapping[str, Any], seen: Seen, take: Callable[[bytes], object]) -> bool:
    """Runs one turn, and tells whether all of it came; ``take`` is called with each piece."""
    last = b""
    try:
        async with aclosing(way.turn(sent)) as pieces:
            async for piece in pieces:
                take(piece)
                last = piece
    except (TurnError, OSError) as error:
        seen.failures.append(str(error))
        return False
    if _END not in last:
        seen.failures.append("the stream was cut")
    return _END in last


def _spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}
