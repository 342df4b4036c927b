"""Streams of two lengths over a stack of simulated engines; what they cost the router, and Envoy."""

import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import httpx2

from backhaul_local.engines import MODEL_NAME
from backhaul_local.options import StackOptions
from backhaul_local.processes import LocalError
from backhaul_local.progress import Steps
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from benchmarks.routing.machine import process_s

_SPEEDS = ("--prefill-tokens-per-s", "200000", "--decode-step-s", "0.01", "--max-running", "128")
_IDLE_S = 5.0
_FIRST_BYTES = 40
"""Turns, one by one, by which the time to the first byte is measured."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    streams: int
    short: int
    """Tokens of each."""
    long: int
    rounds: int

    @property
    def more_tokens(self) -> int:
        """What all long streams of one round have more than all short ones."""
        return self.streams * (self.long - self.short)


@dataclass(slots=True)
class Cost:
    """What one way costs."""

    more_tokens: int
    first_byte_s: float = 0.0
    """Median."""
    idle_share: float = 0.0
    """CPU seconds per second of a router that has nothing to do."""
    short_s: list[float] = field(default_factory=list)
    """CPU seconds of the router, of each round."""
    long_s: list[float] = field(default_factory=list)
    longer_s: list[float] = field(default_factory=list)
    """How much longer the long streams of a round took, seconds of time."""
    envoy_s: list[float] = field(default_factory=list)
    """CPU seconds that Envoy took for a round's long streams more than for its short ones."""

    @property
    def per_1000(self) -> float:
        """CPU seconds of the router per 1,000 tokens more, less what it takes to do nothing for so long."""
        more_s = fmean(self.long_s) - fmean(self.short_s) - self.idle_share * fmean(self.longer_s)
        return 1000 * more_s / self.more_tokens

    @property
    def envoy_per_1000(self) -> float:
        """The same of Envoy."""
        return 1000 * fmean(self.envoy_s) / self.more_tokens


def run(plan: Plan, state: Path, steps: Steps) -> Mapping[str, Cost]:
    """Measures both ways. Raises LocalError."""
    engine = SimulatedEngine(flags=_SPEEDS)
    options = StackOptions(
        state=state,
        prefill=[engine],
        decode=[engine] * 2,
        gateway=True,
        router_flags=["--prefer", "cold", "--lookup-budget-s", "0.5"],
    )
    with Stack(options, steps) as stack:
        urls = {"envoy": stack.gateway, "http": stack.routers[0]}
        idle_share = _idle_share(stack)
        costs = {way: Cost(plan.more_tokens, _first_byte_s(url), idle_share) for way, url in urls.items()}
        for way, url in urls.items():
            steps.begin(f"Streaming: {way}")
            _play(url, plan.streams, plan.short)
            for _ in range(plan.rounds):
                _measure(stack, url, plan, costs[way])
            steps.end(f"Streaming: {way}")
    return costs


def _measure(stack: Stack, url: str, plan: Plan, cost: Cost) -> None:
    spent = []
    for tokens in (plan.short, plan.long):
        before = _spent(stack)
        _play(url, plan.streams, tokens)
        spent.append(tuple(after - of for after, of in zip(_spent(stack), before, strict=True)))
    (short_s, envoy_short_s, short_time_s), (long_s, envoy_long_s, long_time_s) = spent
    cost.short_s.append(short_s)
    cost.long_s.append(long_s)
    cost.envoy_s.append(envoy_long_s - envoy_short_s)
    cost.longer_s.append(long_time_s - short_time_s)


def _spent(stack: Stack) -> tuple[float, float, float]:
    """Returns the CPU seconds of router and Envoy until now, and the time."""
    router_s, envoy_s = (process_s(stack.process(name).pid) for name in ("router-1", "envoy"))
    return router_s, envoy_s, time.monotonic()


def _idle_share(stack: Stack) -> float:
    before, *_ = _spent(stack)
    time.sleep(_IDLE_S)
    after, *_ = _spent(stack)
    return (after - before) / _IDLE_S


def _play(url: str, streams: int, tokens: int) -> None:
    with _client(url) as client, ThreadPoolExecutor(streams) as pool:
        for _ in pool.map(lambda _: _stream(client, tokens), range(streams)):
            pass


def _client(url: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, trust_env=False, timeout=_TIMEOUT_S, limits=httpx2.Limits())


def _stream(client: httpx2.Client, tokens: int) -> float:
    """Reads one stream to its end; returns how long its first byte took, seconds. Raises LocalError."""
    began, first_s = time.perf_counter(), 0.0
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": uuid.uuid4().hex}],
        "stream": True,
        "max_tokens": tokens,
        "min_tokens": tokens,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for _ in answer.iter_raw():
            first_s = first_s or time.perf_counter() - began
    if answer.status_code != 200:
        raise LocalError(f"a stream was answered with {answer.status_code}")
    return first_s


def _first_byte_s(url: str) -> float:
    with _client(url) as client:
        return median(_stream(client, 2) for _ in range(_FIRST_BYTES))
