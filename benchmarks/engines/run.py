"""One run: a stack with one prefill and one decode engine, a router per arm, and every case by every arm in turn."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2
import openai

from backhaul_local.conversation import Plan as Conversation
from backhaul_local.conversation import Turn, play
from backhaul_local.options import StackOptions
from backhaul_local.processes import LocalError
from backhaul_local.progress import Steps
from backhaul_local.stack import Stack
from benchmarks.engines.cases import ARMS, Arm, Case
from benchmarks.engines.emptying import empty_prefix_cache, release_block_sets
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

_FAILURES = (openai.OpenAIError, httpx2.HTTPError)
"""What a turn may end with: a refusal, or a stream that breaks off."""

_MOST_FAILURES = 3
"""Conversations of all that may fail: what is wrong with more of them is wrong with the stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    cases: Sequence[Case]
    rounds: int


@dataclass(slots=True)
class Seen:
    """What clients of one arm saw of one case."""

    conversations: list[Sequence[Turn]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Why conversations ended early."""
    busy: list[tuple[float, float]] = field(default_factory=list)
    """For each conversation: share of the cores that the run used, and that all used."""


Results = Mapping[tuple[str, str], Seen]
"""By case and arm."""

OnConversation = Callable[[Case, Arm, str, Results], None]
"""Told after each one what it was like."""


def run(plan: Plan, options: StackOptions, steps: Steps, on_conversation: OnConversation) -> Results:
    """Plays everything. Raises LocalError when the stack cannot be started, or too many conversations fail."""
    results: defaultdict[tuple[str, str], Seen] = defaultdict(Seen)
    with Stack(options, steps) as stack:
        urls = {arm: stack.add_router([*ROUTER_FLAGS, *arm.router_flags]) for arm in ARMS}
        prefill, decode = stack.node("prefill-1").url, stack.node("decode-1").agent_address
        _warm_up(urls, decode, steps)
        pids = [stack.process(name).pid for name in stack.process_names]
        for case, arm in _conversations(plan):
            seen, meter = results[case.name, arm.name], CpuMeter(pids)
            outcome = _play(seen, case, arm, urls[arm], prefill)
            seen.busy.append(meter.shares())
            on_conversation(case, arm, outcome, results)
            if sum(len(each.failures) for each in results.values()) > _MOST_FAILURES:
                raise LocalError(f"too many conversations failed, the last one so: {outcome}")
            release_block_sets(decode)
    return results


def _warm_up(urls: Mapping[Arm, str], decode: str, steps: Steps) -> None:
    """Raises LocalError."""
    for arm, url in urls.items():
        steps.begin(f"Warming up: {arm.name}")
        try:
            for conversation in _WARM_UPS:
                play(url, conversation, reuse=arm.reuse)
        except _FAILURES as error:
            raise LocalError(f"a turn failed: {error}") from error
        release_block_sets(decode)
        steps.end(f"Warming up: {arm.name}")


def _conversations(plan: Plan) -> Iterator[tuple[Case, Arm]]:
    """Yields every conversation of each arm; who begins changes from one to the next."""
    for number in range(plan.rounds):
        for index, case in enumerate(plan.cases):
            for repeat in range(case.repeats):
                first = (number + index + repeat) % len(ARMS)
                yield from ((case, arm) for arm in (*ARMS[first:], *ARMS[:first]))


def _play(seen: Seen, case: Case, arm: Arm, url: str, prefill: str) -> str:
    """Plays a conversation; returns what it was like."""
    try:
        turns = _played(case, arm, url, prefill)
    except _FAILURES as error:
        seen.failures.append(str(error))
        return f"failed: {error}"
    seen.conversations.append(turns)
    return ", ".join(f"{turn.route} {1000 * turn.ttft_s:.0f} ms" for turn in turns)


def _played(case: Case, arm: Arm, url: str, prefill: str) -> Sequence[Turn]:
    conversation = Conversation(
        turns=case.turns,
        document_words=case.document_words,
        reply_tokens=case.reply_tokens,
        last_reply_tokens=case.last_reply_tokens,
    )

    def on_end(number: int, _turn: Turn) -> None:
        if number < case.turns:
            time.sleep(_THINK_S)
            if case.lost:
                empty_prefix_cache(prefill)

    return play(url, conversation, reuse=arm.reuse, on_end=on_end)
