"""One run: a stack with one prefill and one decode engine, a router per arm, and every case by every arm in turn."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2

from backhaul_local.conversation import Plan as Conversation
from backhaul_local.conversation import Turn, play
from backhaul_local.options import StackOptions
from backhaul_local.processes import LocalError
from backhaul_local.progress import Steps
from backhaul_local.stack import Stack
from benchmarks.engines.cases import ARMS, Arm, Case
from benchmarks.routing.machine import CpuMeter

ROUTER_FLAGS = ("--lookup-budget-s", "0.25")
"""Engines and services share the cores: a lookup now and then waits longer for one than the router's default allows."""

_WARM_UPS = (
    Conversation(turns=3, document_words=300, reply_tokens=80),
    Conversation(turns=1, document_words=30, reply_tokens=8),
)
"""Engines that have never met shake hands first, and a router that has just started knows nothing of them."""

_THINK_S = 0.3
"""From the end of a turn to the next one, seconds."""
_EMPTIED_WITHIN_S = 30.0
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    cases: Sequence[Case]
    rounds: int


@dataclass(slots=True)
class Seen:
    """What clients of one arm saw of one case."""

    conversations: list[Sequence[Turn]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    """For each block: share of the cores that the run used, and that all used."""


Results = Mapping[tuple[str, str], Seen]
"""By case and arm."""

OnBlock = Callable[[Case, Arm, Results], None]


def run(plan: Plan, options: StackOptions, steps: Steps, on_block: OnBlock) -> Results:
    """Plays everything. Raises LocalError when the stack cannot be started, openai.OpenAIError when a turn fails."""
    results: defaultdict[tuple[str, str], Seen] = defaultdict(Seen)
    with Stack(options, steps) as stack:
        urls = {arm: stack.add_router([*ROUTER_FLAGS, *arm.router_flags]) for arm in ARMS}
        for url in urls.values():
            for conversation in _WARM_UPS:
                play(url, conversation, reuse=True)
        pids = [stack.process(name).pid for name in stack.process_names]
        prefill = stack.node("prefill-1").url
        for number in range(plan.rounds):
            for index, case in enumerate(plan.cases):
                for arm in _rotated(ARMS, number + index):
                    meter = CpuMeter(pids)
                    seen = results[case.name, arm.name]
                    seen.conversations += [_played(case, urls[arm], prefill) for _ in range(case.repeats)]
                    seen.busy.append(meter.shares())
                    on_block(case, arm, results)
    return results


def _rotated(arms: Sequence[Arm], by: int) -> Sequence[Arm]:
    """Who begins changes from block to block."""
    first = by % len(arms)
    return (*arms[first:], *arms[:first])


def _played(case: Case, url: str, prefill: str) -> Sequence[Turn]:
    conversation = Conversation(turns=case.turns, document_words=case.document_words, reply_tokens=case.reply_tokens)

    def on_end(number: int, _turn: Turn) -> None:
        if number < case.turns:
            time.sleep(_THINK_S)
            if case.lost:
                empty_prefix_cache(prefill)

    return play(url, conversation, reuse=True, on_end=on_end)


def empty_prefix_cache(engine: str) -> None:
    """Empties an engine's prefix cache; waits until it can be. Raises LocalError when it cannot.

    vLLM answers 200 with ``"success": false`` while any block is in use, as those of a hand-off are until it is read.
    """
    give_up_at = time.monotonic() + _EMPTIED_WITHIN_S
    with httpx2.Client(trust_env=False, timeout=_TIMEOUT_S) as client:
        while True:
            reply = client.post(f"{engine}/reset_prefix_cache")
            if reply.status_code == httpx2.codes.OK and reply.json()["success"]:
                return
            if time.monotonic() > give_up_at:
                raise LocalError(f"{engine}: the prefix cache could not be emptied: {reply.status_code} {reply.text}")
            time.sleep(0.1)
