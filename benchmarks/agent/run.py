"""Agents beside engines that retain few and many block sets, all on one stack, measured in the same seconds.

All is real but the engines: etcd, a registry, the agents with their connectors and pointers. Each arm has an engine and
an agent of its own. Sets are renewed as they are in service: an engine's lease is what docs/engines.md recommends.
"""

import asyncio
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from backhaul_local.options import StackOptions
from backhaul_local.ports import HOST, Ports
from backhaul_local.processes import LocalError, ProcessSpec, Supervisor
from backhaul_local.progress import Steps
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Node, Stack
from benchmarks.agent.turns import TOKENS, Turns
from benchmarks.routing.machine import CpuMeter, process_s

LEASE_S = 180.0
"""``kv_lease_duration``: a renewal keeps a set for two thirds of it, and comes 34 s before that ends."""
PERIOD_S = 86.0
"""So all sets are renewed once in this time."""

_TTL_S = 120.0
"""What a new set has left: as much as a renewed one."""
_BLOCK_SIZE = 32
_BLOCKS_PER_SET = -(-(TOKENS + 1) // _BLOCK_SIZE)
_SETTLE_S = PERIOD_S
"""Until every set has been renewed once."""
_HTTP_S = 10.0
_PREFIX = "backhaul_agent_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One agent and what it has to do."""

    name: str
    set_count: int
    nixl: bool = False
    """Whether it speaks NIXL itself, through a relay; else the simulator's stand-in."""
    turns_per_s: float = 0.0
    """Turns that end while it is measured: as its budget is full, each makes an older set give way."""

    @property
    def block_count(self) -> int:
        """Blocks of its engine: half of them are the budget, which is full where turns end."""
        share = 2 if self.turns_per_s else 3
        return max(1_000, share * _BLOCKS_PER_SET * self.set_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    arms: Sequence[Arm]
    rounds: int
    seconds: float
    """Of each round."""


@dataclass(slots=True)
class Seen:
    """What was seen of one arm, by round."""

    set_count: list[int] = field(default_factory=list)
    """At the end."""
    cpu_share: list[float] = field(default_factory=list)
    """CPU seconds of the agent per second: its share of one core."""
    renewals_per_s: list[float] = field(default_factory=list)
    """Sets that the engine was asked to keep."""
    confirmed_per_s: list[float] = field(default_factory=list)
    """Deadlines that the engine says it moved."""
    releases_per_s: list[float] = field(default_factory=list)
    lost: int = 0
    """Notifications that did not leave."""


@dataclass(slots=True)
class Results:
    """What was seen of all."""

    arms: Mapping[str, Seen]
    machine_cpu_share: list[float] = field(default_factory=list)
    """Share of all cores that anything used, by round."""
    own_cpu_share: list[float] = field(default_factory=list)
    """Share of all cores that these processes used."""


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    cpu_s: float
    figures: Mapping[str, float]


class RelayNetwork:
    """Puts a relay in front of the side channels of some engines."""

    def __init__(self, engines: Sequence[str], logs: Path) -> None:
        """``engines``: names of their processes."""
        self._engines = engines
        self._supervisor = Supervisor(logs)
        self._ports = Ports()
        self._relays: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._supervisor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._supervisor.__exit__(kind, error, trace)

    def between(self, source: str, target: str, address: str) -> str:
        """See `backhaul_local.options.Network`."""
        engine, _, what = target.partition(" ")
        return self._relay(engine, address) if what == "side channel" and engine in self._engines else address

    def _relay(self, engine: str, address: str) -> str:
        if engine not in self._relays:
            port = self._ports.take()
            command = [sys.executable, "-m", "benchmarks.agent.relay", str(port), address]
            self._supervisor.start(ProcessSpec(name=f"relay-{engine}", command=command))
            self._relays[engine] = f"{HOST}:{port}"
        return self._relays[engine]


def nixl_installed() -> bool:
    """Tells whether agents can speak NIXL itself here."""
    return importlib.util.find_spec("nixl") is not None


def run(plan: Plan, state: Path, steps: Steps) -> Results:
    """Measures all arms side by side. Raises LocalError."""
    names = {f"decode-{number}": arm for number, arm in enumerate(plan.arms, start=1)}
    with ExitStack() as stack:
        network = stack.enter_context(RelayNetwork([name for name, arm in names.items() if arm.nixl], state / "logs"))
        options = StackOptions(
            state=state,
            prefill=(),
            decode=[_engine(arm) for arm in plan.arms],
            routers=0,
            metrics=True,
            network=network,
        )
        running = stack.enter_context(Stack(options, steps))
        return asyncio.run(
            _measure(plan, running, {arm.name: running.node(name) for name, arm in names.items()}, steps)
        )


def _engine(arm: Arm) -> SimulatedEngine:
    flags = ("--block-size", str(_BLOCK_SIZE), "--block-count", str(arm.block_count))
    # Without the stand-in in front of it, an agent finds NIXL itself.
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} if arm.nixl else {}
    return SimulatedEngine(ttl_s=_TTL_S, lease_s=LEASE_S, flags=flags, agent_env=env)


async def _measure(plan: Plan, stack: Stack, nodes: Mapping[str, Node], steps: Steps) -> Results:
    results = Results({arm.name: Seen() for arm in plan.arms})
    pids = [stack.process(name).pid for name in stack.process_names]
    async with AsyncExitStack() as resources:
        http = await resources.enter_async_context(aiohttp.ClientSession(trust_env=False))
        turns = {arm.name: Turns(nodes[arm.name].url, http) for arm in plan.arms}
        steps.begin("Leaving block sets")
        await asyncio.gather(*(turns[arm.name].leave(arm.set_count) for arm in plan.arms))
        steps.end("Leaving block sets")
        steps.begin("Measuring")
        end = time.monotonic() + _SETTLE_S + plan.rounds * plan.seconds
        busy = [
            asyncio.create_task(turns[arm.name].go_on(arm.turns_per_s, end)) for arm in plan.arms if arm.turns_per_s
        ]
        await asyncio.sleep(_SETTLE_S)
        for number in range(plan.rounds):
            meter = CpuMeter(pids)
            before = {arm.name: await _read(stack, nodes[arm.name], http) for arm in plan.arms}
            await asyncio.sleep(max(0.0, end - (plan.rounds - number - 1) * plan.seconds - time.monotonic()))
            for arm in plan.arms:
                _note(results.arms[arm.name], before[arm.name], await _read(stack, nodes[arm.name], http))
            own, everything = meter.shares()
            results.own_cpu_share.append(own)
            results.machine_cpu_share.append(everything)
        await asyncio.gather(*busy)
        steps.end("Measuring")
    return results


async def _read(stack: Stack, node: Node, http: aiohttp.ClientSession) -> _Reading:
    """Asks an agent for its figures; what that costs it falls before the time that it is read for."""
    timeout = aiohttp.ClientTimeout(total=_HTTP_S)
    async with http.get(f"http://{stack.metrics[node.agent]}/metrics", timeout=timeout) as answer:
        page = await answer.text()
    figures: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            figures[sample.name] = figures.get(sample.name, 0.0) + sample.value
    cpu_s = process_s(stack.process(node.agent).pid)
    if not cpu_s:
        raise LocalError(f"{node.agent} has ended")
    return _Reading(time.monotonic(), cpu_s, figures)


def _note(seen: Seen, before: _Reading, after: _Reading) -> None:
    seconds = after.at - before.at

    def per_s(name: str) -> float:
        return (after.figures.get(name, 0.0) - before.figures.get(name, 0.0)) / seconds

    seen.cpu_share.append((after.cpu_s - before.cpu_s) / seconds)
    seen.set_count.append(round(after.figures[f"{_PREFIX}block_sets"]))
    seen.renewals_per_s.append(per_s(f"{_PREFIX}renewals_total"))
    seen.confirmed_per_s.append(per_s(f"{_PREFIX}deadlines_confirmed_total"))
    seen.releases_per_s.append(per_s(f"{_PREFIX}releases_total"))
    seen.lost = round(after.figures.get(f"{_PREFIX}notifications_lost_total", 0.0))
