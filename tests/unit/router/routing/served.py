"""Prompts on an engine that computes them in the order in which they come, as routers see them."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle

from backhaul_router.core.load import Load, Work
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.demand import Demand
from backhaul_router.core.routing.estimates import Estimator
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.reports import EngineReport, Reports
from backhaul_router.core.routing.target import Target
from tests.unit.router.routing.targets import target

DECODE = target("d1")
"""Takes over whatever is computed, at once."""

Prompt = tuple[float, int]
"""When it is sent, and its tokens."""


class Now:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One prompt on an engine."""

    sent_at: float
    computed: int
    done_at: float
    turn_at: float
    """When all that was sent before it was done."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a prompt had to wait for its turn."""

    foreseen_s: float
    real_s: float


def prompts(rng: random.Random, *, count: int, per_s: float, tokens: tuple[int, int]) -> list[Prompt]:
    """Returns prompts that come at random."""
    at, sent = 0.0, []
    for _ in range(count):
        at += rng.expovariate(per_s)
        sent.append((at, rng.randint(*tokens)))
    return sent


def one_by_one(sent: Iterable[Prompt], cost_s: Callable[[int], float]) -> Iterator[Job]:
    """Runs prompts on an engine that computes one at a time."""
    turn_at = 0.0
    for sent_at, computed in sent:
        done_at = max(sent_at, turn_at) + cost_s(computed)
        yield Job(sent_at, computed, done_at, turn_at)
        turn_at = done_at


def in_steps(sent: Sequence[Prompt], cost_s: Callable[[int], float], *, budget: int) -> Iterator[Job]:
    """Runs prompts on an engine that computes up to ``budget`` tokens a step, of as many prompts as fit."""
    left = [computed for _, computed in sent]
    now = turn_at = 0.0
    first = 0
    while first < len(sent):
        now = max(now, sent[first][0])
        room = budget
        for index in range(first, len(sent)):
            if sent[index][0] > now or not room:
                break
            taken = min(room, left[index])
            left[index] -= taken
            room -= taken
        now += cost_s(budget - room)
        while first < len(sent) and not left[first]:
            yield Job(*sent[first], now, turn_at)
            turn_at = now
            first += 1


class Router:
    """What one router knows. Nothing has been learnt yet: legs cost what the priors say."""

    def __init__(self, now: Now) -> None:
        self.load = Load(now)
        self.costs = Costs(now)
        self.prefixes = Prefixes()
        self.reports = Reports(now)
        self.estimator = Estimator(self.load, self.costs, self.prefixes, self.reports, disturbance=0.1)


def watch(jobs: Iterable[Job], prefill: Target, now: Now, *routers: Router) -> list[Wait]:
    """Has routers send these prompts in turns, and learn from them. Returns the waits of those that had to wait."""
    jobs = list(jobs)
    events = [*((job.done_at, 0, job) for job in jobs), *((job.sent_at, 1, job) for job in jobs)]
    waits: list[Wait] = []
    running: dict[Job, tuple[Router, ExitStack, Work]] = {}
    turns = cycle(routers)
    for at, sends, job in sorted(events, key=lambda event: event[:2]):
        now.value = at
        if sends:
            router = next(turns)
            estimate = router.estimator.cold(Demand("m", job.computed), prefill, DECODE)
            if job.turn_at > at:
                waits.append(Wait(estimate.wait_s, job.turn_at - at))
            leg = ExitStack()
            others = router.estimator.others_before(prefill)
            work = leg.enter_context(router.load.running(prefill, expected_s=estimate.prefill_s, others=others))
            running[job] = router, leg, work
        else:
            router, leg, work = running.pop(job)
            router.costs.note_prefill(prefill.key, computed=job.computed, read=0, seconds=work.served())
            leg.close()
        report = EngineReport(min(len(running), 1), max(len(running) - 1, 0), 0.0)
        for router in routers:
            router.reports.take(prefill.key, report)
    return waits
