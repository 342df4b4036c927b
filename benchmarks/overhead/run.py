"""All arms, interleaved, over one set of processes."""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from backhaul_common.grpc_client import open_channel
from backhaul_local.processes import Supervisor
from benchmarks.overhead.fleet import Addresses, fleet, joined
from benchmarks.overhead.play import Cpu, Seen, body, long_streams, short_turns
from benchmarks.overhead.ways import Direct, OverGrpc, OverHttp, Way
from benchmarks.routing.machine import CpuMeter, process_s

DIRECT, PEER, PLAIN = "direct", "vllm-router", "plain-envoy"

LATER = "http-later"
"""Turns that go on with a conversation: the router asks the registry what there is of it, and finds nothing."""

ARMS: Mapping[str, tuple[str, ...]] = {
    DIRECT: (),
    PEER: ("vllm-router",),
    "http": ("router",),
    LATER: ("router",),
    "grpc": ("router",),
    "envoy": ("router", "envoy"),
    PLAIN: ("plain-envoy",),
}
"""By name, the processes between client and engines."""

SHORT, LONG = "short", "long"
_IDLE_S = 3.0
_WARM_UP_S = 0.5
_LEAST_GAP_S = 0.002

OnWindow = Callable[[str, str, int, Seen], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    arms: Sequence[str]
    streams: Sequence[int]
    rounds: int
    seconds: float
    """Of each window."""
    tokens: int
    """Of a short turn."""
    events_per_s: int
    """Of all long streams together."""

    def gap_s(self, streams: int) -> float:
        """Returns how far apart the events of one long stream are."""
        return max(_LEAST_GAP_S, streams / self.events_per_s)


@dataclass(frozen=True, slots=True)
class Results:
    """What was seen."""

    idle: Mapping[str, float]
    """CPU seconds per second of each process that has nothing to do."""
    seen: Mapping[tuple[str, str, int], Sequence[Seen]]
    """By load, arm and streams: one for each round."""


def run(plan: Plan, state: Path, peer: Path | None, on_window: OnWindow) -> tuple[Results, float]:
    """Plays everything; returns also what share of the cores had other things to do. Raises LocalError."""
    with fleet(state, peer=peer) as (supervisor, at):
        meter = CpuMeter(process.pid for process in supervisor)
        results = uvloop.run(_play(plan, supervisor, at, on_window))
        own, machine = meter.shares()
    return results, max(0.0, machine - own)


async def _play(plan: Plan, supervisor: Supervisor, at: Addresses, on_window: OnWindow) -> Results:
    def cpu() -> Mapping[str, float]:
        return {process.name: process_s(process.pid) for process in supervisor}

    async with joined(at), _ways(at) as ways:
        for arm in plan.arms:
            await short_turns(ways[arm], body(plan.tokens), streams=8, seconds=_WARM_UP_S, cpu=cpu)
        idle = await _idle(cpu)
        seen: defaultdict[tuple[str, str, int], list[Seen]] = defaultdict(list)
        for _ in range(plan.rounds):
            for streams in plan.streams:
                for load, arms in ((SHORT, plan.arms), (LONG, [arm for arm in plan.arms if arm != LATER])):
                    for arm in arms:
                        window = await _window(plan, load, ways[arm], arm, streams, cpu)
                        seen[load, arm, streams].append(window)
                        on_window(load, arm, streams, window)
    return Results(idle, seen)


async def _window(plan: Plan, load: str, way: Way, arm: str, streams: int, cpu: Cpu) -> Seen:
    if load == LONG:
        gap_s = plan.gap_s(streams)
        return await long_streams(way, streams=streams, gap_s=gap_s, seconds=plan.seconds, cpu=cpu)
    sent = body(plan.tokens, history=uuid.uuid4().hex if arm == LATER else "")
    return await short_turns(way, sent, streams=streams, seconds=plan.seconds, cpu=cpu)


async def _idle(cpu: Cpu) -> Mapping[str, float]:
    before, began = cpu(), time.perf_counter()
    await asyncio.sleep(_IDLE_S)
    seconds = time.perf_counter() - began
    return {name: (spent - before[name]) / seconds for name, spent in cpu().items()}


@asynccontextmanager
async def _ways(at: Addresses) -> AsyncIterator[Mapping[str, Way]]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
        open_channel(at.grpc) as channel,
    ):
        yield {
            DIRECT: Direct(session, f"http://{at.prefill}", f"http://{at.decode}"),
            PEER: OverHttp(session, f"http://{at.peer}"),
            "http": OverHttp(session, f"http://{at.http}"),
            LATER: OverHttp(session, f"http://{at.http}"),
            "grpc": OverGrpc(channel),
            "envoy": OverHttp(session, f"http://{at.envoy}"),
            PLAIN: OverHttp(session, f"http://{at.plain}"),
        }
