"""Plays conversations on a cluster in virtual time, and counts."""

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backhaul_router.core.body import Endpoint
from backhaul_router.core.errors import ApiError
from backhaul_router.ports import TurnRequest
from benchmarks.routing.loads import LOADS, Conversation, Load, Passage
from benchmarks.scale.cluster import PLANNER, ROUTER, Running, cluster
from benchmarks.scale.meter import Meter
from benchmarks.scale.virtual import VirtualClock, VirtualLoop

_MIXED = LOADS["mixed"]
_PREFILL_ENGINES = 2
"""Engines that the load is made for."""

_TURNS_PER_CONVERSATION = 7.0
_MODEL = "m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one cluster has shown. Times are CPU seconds unless they are said to be virtual."""

    prefill: int
    decode: int
    turns: int
    failures: int
    routes: dict[str, int]
    misses: dict[str, int]
    prompt_tokens: int
    """Of all turns."""
    prefill_tokens: int
    """Of those prompts that a prefill engine was sent."""
    computed_tokens: int
    """Of these, what prefill engines computed."""
    virtual_s: float
    cpu_s: dict[str, float]
    calls: dict[str, int]
    """Calls and messages to servers, by method."""
    sent_bytes: dict[str, int]
    etcd_requests: dict[str, int]
    etcd_written_bytes: int
    etcd_stored_bytes: int
    held_sets: int


def play(prefill: int, decode: int, *, turns: int, seed: str) -> Counts:
    """Plays about so many turns, at a rate that goes with the number of prefill engines."""
    share = prefill / _PREFILL_ENGINES
    load = Load(name=_MIXED.name, per_s={kind: share * per_s for kind, per_s in _MIXED.per_s.items()})
    duration_s = turns / _TURNS_PER_CONVERSATION / sum(load.per_s.values())
    conversations = load.conversations(seed, duration_s=duration_s)
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        # Each service has a heap of its own; here they share one, and none shall pay for collecting all of it.
        gc.disable()
        return loop.run_until_complete(_play(loop, prefill, decode, conversations))
    finally:
        gc.enable()
        asyncio.set_event_loop(None)
        loop.close()


async def _play(loop: VirtualLoop, prefill: int, decode: int, conversations: Sequence[Conversation]) -> Counts:
    meter, clock = Meter(), VirtualClock(loop)
    meter.pay_for_tasks(loop)
    async with cluster(prefill, decode, meter=meter, clock=clock) as running:
        await clock.sleep(3.0)
        before, began = _Marks(running), clock.monotonic()
        meter.reset()
        seen = _Seen(running, meter)
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(seen.converse(conversation))
        virtual_s, cpu_s = clock.monotonic() - began, dict(meter.cpu_s)
        after = _Marks(running)
    cpu_s[ROUTER] = cpu_s.get(ROUTER, 0.0) + cpu_s.get(PLANNER, 0.0)
    engines = running.engines
    return Counts(
        prefill=prefill,
        decode=decode,
        turns=seen.routes.total(),
        failures=seen.failures,
        routes=dict(seen.routes.most_common()),
        misses=dict(seen.misses.most_common()),
        prompt_tokens=seen.prompt_tokens,
        prefill_tokens=engines.prompt_tokens,
        computed_tokens=engines.prompt_tokens - engines.local_tokens - engines.read_tokens,
        virtual_s=virtual_s,
        cpu_s=cpu_s,
        calls=dict(after.calls - before.calls),
        sent_bytes=dict(after.sent_bytes - before.sent_bytes),
        etcd_requests=dict(after.etcd_requests - before.etcd_requests),
        etcd_written_bytes=after.written_bytes - before.written_bytes,
        etcd_stored_bytes=running.etcd.stored_bytes,
        held_sets=sum(node.set_count for node in running.nodes),
    )


class _Marks:
    """What has been counted until now."""

    def __init__(self, running: Running) -> None:
        self.calls = Counter(running.network.calls)
        self.sent_bytes = Counter(running.network.sent_bytes)
        self.etcd_requests = Counter(running.etcd.requests)
        self.written_bytes = running.etcd.written_bytes


class _Seen:
    """What clients see."""

    def __init__(self, running: Running, meter: Meter) -> None:
        self.routes: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.failures = 0
        self.prompt_tokens = 0
        self._running = running
        self._meter = meter

    async def converse(self, conversation: Conversation) -> None:
        """Plays one conversation."""
        await asyncio.sleep(conversation.arrival_s)
        name, system = conversation.name, conversation.system
        messages: list[dict[str, str]] = [{"role": "system", "content": system.text}]
        token_count = system.word_count + 3
        self._running.openings[conversation.turns[0].says.text] = name
        for index, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.pause_s)
            messages.append({"role": "user", "content": turn.says.text})
            token_count += turn.says.word_count + 3
            self._running.prompts[name] = token_count + 2
            self.prompt_tokens += token_count + 2
            body: dict[str, Any] = {"model": _MODEL, "messages": messages, "max_tokens": turn.answer_tokens}
            request = TurnRequest(Endpoint.CHAT, msgspec.json.encode({**body, "stream": True, "user": name}), tenant="")
            try:
                await self._meter.within(ROUTER, self._turn(request))
            except ApiError:
                self.failures += 1
                return
            answer = Passage(f"{name}-answer-{index}", turn.answer_tokens).text
            messages.append({"role": "assistant", "content": answer})
            token_count += turn.answer_tokens + 3

    async def _turn(self, request: TurnRequest) -> None:
        async with self._running.turns.run(request) as answer:
            assert answer.stream is not None
            async for _ in answer.stream.chunks():
                pass
        self.routes[answer.outcome.route.value] += 1
        if answer.outcome.miss:
            self.misses[answer.outcome.miss] += 1
