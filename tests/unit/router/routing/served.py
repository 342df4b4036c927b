"""Prompts on an engine that computes them in the order in which they come, as a router sees them."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from backhaul_router.core.load import Load, Work
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.target import Target

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


def watch(jobs: Iterable[Job], target: Target, now: Now, load: Load, costs: Costs) -> list[Wait]:
    """Lets a router see these prompts, and learn from them. Returns the waits of those that had to wait."""
    jobs = list(jobs)
    events = sorted(
        [*((job.done_at, 0, job) for job in jobs), *((job.sent_at, 1, job) for job in jobs)],
        key=lambda event: event[:2],
    )
    waits: list[Wait] = []
    running: dict[Job, tuple[ExitStack, Work]] = {}
    for at, sends, job in events:
        now.value = at
        if sends:
            if job.turn_at > at:
                waits.append(Wait(load.wait_s(target.key), job.turn_at - at))
            leg = ExitStack()
            expected_s = costs.prefill_s(target.key, computed=job.computed, read=0)
            running[job] = leg, leg.enter_context(load.running(target, expected_s=expected_s))
        else:
            leg, work = running.pop(job)
            costs.note_prefill(target.key, computed=job.computed, read=0, seconds=work.served())
            leg.close()
    return waits
