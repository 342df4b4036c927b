"""Second chances: fresh handles for what the engines beside this agent still cache, and pointers that lead to them.

Follows what each engine caches, asks it for a handle when a router wants one, and keeps the cached pointers in step.
What may be asked for, and when: see `core.second_chance`.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from backhaul_connector.anchors import AnchorChain, Anchors, identity_of, stride_of
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core import second_chance
from backhaul_node_agent.core.block_set import BlockSet, EngineFacts
from backhaul_node_agent.core.cached import Cached, Change, Stored
from backhaul_node_agent.core.claim_book import SetName
from backhaul_node_agent.core.engine_clock import EngineClock
from backhaul_node_agent.core.granting import Grant
from backhaul_node_agent.core.life import Limits
from backhaul_node_agent.core.node import ServerFacts
from backhaul_node_agent.core.second_chance import Backoff, CachedPointers
from backhaul_node_agent.engine_requests import Kept

_log = structlog.get_logger(__name__)

MARGIN_S = 5.0
"""How much earlier than the engine's lease a handle ends. vLLM starts no read in the last 5 s before its deadline
(nixl/pull_worker.py, `_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`): a prefill engine without Backhaul's connector, which has no
fence for reads that end late, so has ten seconds for a read."""

_LEAST_S = 0.05
"""With less time left the engine is not asked: it could not answer."""
_ANSWER_S = 0.02
"""What an answer needs of its caller's time: a handle that the caller does not hear of stays pinned for the lease."""
_MOST_S = 2.0
"""Most that a call may wait for the engine, whatever its caller allows."""
_MOST_AT_ONCE = 8
"""Requests to one engine at the same time; more are refused like a guess that was wrong."""
_MOST_WRONG_BLOCKS = 2
"""An engine that has to compute more did not cache what its events said."""
_SLOW_S = 0.5
"""An engine that does not say what it computed, and took longer than this, is taken to have computed too much."""
_MOST_HANDLES = 10_000
"""Handles given out whose names are kept; the oldest can then be released no more, and end with their lease."""


@dataclass(frozen=True, slots=True)
class HarvestRequest:
    """What a router asks for."""

    set_id: str
    engine_id: str
    scope: str
    weights_digest: str
    model: str
    cache_salt: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Harvested:
    """A fresh handle."""

    grant: Grant
    hand_off_id: str
    computed_count: int
    """0 when the engine does not say it."""


class Owner(Protocol):
    """What is asked of the owner of the engines' block sets."""

    @property
    def draining(self) -> bool: ...

    def engines(self) -> Sequence[EngineFacts]: ...

    def lease_valid(self, now: float) -> bool: ...

    def clock(self, engine_id: str) -> EngineClock | None: ...


class Events(Protocol):
    """The engines' KV events."""

    def follow(self, rank: int) -> None: ...

    def connected(self, rank: int) -> bool: ...


class Requests(Protocol):
    """Requests to the engines."""

    async def keep(
        self, *, model: str, token_ids: Sequence[int], salt: str, rank: int | None, left_over: Callable[[Kept], None]
    ) -> Kept: ...


class Pointers(Protocol):
    """Pointers in the registry."""

    def publish(self, engine_id: str, block_set: BlockSet) -> None: ...

    def unpublish(self, engine_id: str, block_set: BlockSet) -> None: ...

    def forget(self, engine_id: str) -> None: ...


@dataclass(slots=True)
class _Engine:
    engine_id: str
    rank: int
    cached: Cached = field(default_factory=Cached)
    pointers: CachedPointers = field(default_factory=CachedPointers)
    backoff: Backoff = field(default_factory=Backoff)
    clock: EngineClock = field(default_factory=EngineClock)
    asked: int = 0
    """Requests under way."""
    tp_size: int = 1


class Harvest:
    """Second chances of one node. Does nothing without `events`."""

    def __init__(
        self,
        *,
        owner: Owner,
        events: Events | None,
        requests: Requests,
        pointers: Pointers,
        release: Callable[[ev.SendRelease], None],
        server: Callable[[], ServerFacts | None],
        clock: Clock,
        limits: Limits,
        weights_digest: str,
        engine_lease_s: float,
        ranks: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`weights_digest` and `engine_lease_s` count for engines whose connector does not say better.

        `ranks` are those of the server, as far as known.
        """
        self._owner = owner
        self._events = events
        self._requests = requests
        self._pointers = pointers
        self._release = release
        self._server = server
        self._clock = clock
        self._limits = limits
        self._weights_digest = weights_digest
        self._engine_lease_s = engine_lease_s
        self._ranks = ranks
        self._by_rank: dict[int, _Engine] = {}
        self._handles: OrderedDict[tuple[str, str], float] = OrderedDict()

    # --- what the engines say

    def on_engine(self, rank: int, engine_id: str, sent: float, engine_now: float | None, received: float) -> None:
        """Takes which engine answers as a rank, and a sample of its clock: see `EngineClock.observe`."""
        if self._events is None:
            return
        engine = self._known(rank, engine_id)
        if engine_now is not None:
            engine.clock = engine.clock.observe(sent=sent, engine_now=engine_now, received=received)
        self._events.follow(rank)

    def on_changes(self, rank: int, sequence: int, changes: Sequence[Change]) -> None:
        """Takes a batch of KV events."""
        engine = self._by_rank.get(rank)
        if engine is None:
            return
        if not engine.cached.apply(sequence, changes):
            _log.info("KV events begin anew", engine=engine.engine_id, sequence=sequence)
        labels = dict.fromkeys(change.session for change in changes if isinstance(change, Stored) and change.session)
        for label in labels:
            pointer = second_chance.labelled_pointer(label)
            if pointer is not None:
                self._add(engine, pointer)

    def on_lost(self, rank: int) -> None:
        """Takes note that events of a rank could not be read."""
        if engine := self._by_rank.get(rank):
            engine.cached.forget()

    # --- what the owner's sets become

    def let_go(self, engine_id: str, block_set: BlockSet) -> None:
        """Keeps a pointer to a set that is retained no more, though nobody came back for it."""
        engine = self._engine(engine_id)
        pointer = second_chance.cached_pointer(block_set)
        if engine is not None and pointer is not None:
            self._add(engine, pointer)

    def retained(self, engine_id: str, block_set: BlockSet) -> None:
        """Drops the pointers that a set which the engine retains now stands in for."""
        if engine := self._engine(engine_id):
            self._remove(engine, engine.pointers.superseded(block_set))

    def forget(self, engine_id: str) -> None:
        """Ends an incarnation."""
        if engine := self._engine(engine_id):
            del self._by_rank[engine.rank]

    def tick(self) -> None:
        """Drops what has grown old, and everything while the node drains. Called several times a second."""
        now = self._clock.monotonic()
        for engine in self._by_rank.values():
            born_before = math.inf if self._owner.draining else now - self._limits.max_retention_s
            gone = engine.pointers.aged(born_before)
            self._remove(engine, gone)
        while self._handles and next(iter(self._handles.values())) < now:
            self._handles.popitem(last=False)

    # --- what is told to others

    def offered(self, engine_id: str) -> bool:
        """Tells whether handles can be had for an engine."""
        engine = self._engine(engine_id)
        return (
            engine is not None
            and self._events is not None
            and self._events.connected(engine.rank)
            and engine.cached.countable
            and bool(self._weights_of(engine_id))
            and self._clock_of(engine).trusted
        )

    def offered_engines(self) -> list[str]:
        """Names the engines for which handles can be had."""
        return [engine.engine_id for engine in self._by_rank.values() if self.offered(engine.engine_id)]

    def tp_size(self, engine_id: str) -> int:
        """Returns how many tensor-parallel ranks an engine has, as far as its handles said."""
        engine = self._engine(engine_id)
        return engine.tp_size if engine else 1

    def release(self, engine_id: str, hand_off_id: str) -> bool:
        """Gives a handle back that was given out here; False when it was not."""
        if (engine_id, hand_off_id) not in self._handles:
            return False
        self._release(ev.SendRelease(engine_id, hand_off_id))
        return True

    def drop(self, set_id: str) -> bool:
        """Drops the pointer to what is merely cached, as nobody will come back for it; False when there is none."""
        found = [(engine, pointer) for engine in self._by_rank.values() if (pointer := engine.pointers.drop(set_id))]
        for engine, pointer in found:
            self._remove(engine, [pointer])
        return bool(found)

    async def harvest(self, request: HarvestRequest, timeout_s: float) -> Harvested:
        """Makes a fresh handle within a time limit.

        Raises BackhaulError with the reasons of `HarvestBlockSet`. Whatever ends it, cancellation included, nothing
        stays pinned that is known to be.
        """
        engine = self._checked(request)
        count = engine.cached.count(request.token_ids, request.cache_salt)
        pointer = engine.pointers.get(request.set_id)
        if not second_chance.enough(count, pointer.token_count if pointer else 0):
            size = engine.cached.block_size
            if pointer and second_chance.evicted(pointer, _identity(request), request.token_ids, count, size):
                self._remove(engine, [pointer])
                engine.pointers.drop(pointer.set_id)
            raise NotFoundError("NOT_CACHED", f"the engine caches {count} tokens of the prompt")
        timeout_s = min(timeout_s - _ANSWER_S, _MOST_S)
        if timeout_s < _LEAST_S:
            raise DeadlineExceededError("DEADLINE_EXCEEDED", "too little time is left to ask the engine")
        kept, sent = await self._ask(engine, request, count, timeout_s)
        try:
            return self._granted(engine, request, count, kept, sent)
        except BaseException:
            self._let_loose(kept)
            raise

    def _checked(self, request: HarvestRequest) -> _Engine:
        """Returns the engine that may be asked. Raises BackhaulError when none may."""
        now = self._clock.monotonic()
        engine = self._engine(request.engine_id)
        if self._events is None:
            raise FailedPreconditionError("NO_EVENTS", "this agent does not follow what its engine caches: --kv-events")
        if engine is None:
            raise NotFoundError("ENGINE_UNKNOWN", "no such engine here")
        if self._owner.draining:
            raise FailedPreconditionError("DRAINING", "the node is being drained")
        if not self._owner.lease_valid(now):
            raise FailedPreconditionError("LEASE_INVALID", "this agent's lease is not valid")
        if not self._weights_of(engine.engine_id) or self._weights_of(engine.engine_id) != request.weights_digest:
            raise FailedPreconditionError("WEIGHTS_MISMATCH", "the engines do not have the same weights for certain")
        server = self._server()
        if server is None or request.model not in server.base_models:
            raise FailedPreconditionError("UNSUPPORTED_MODEL", "only base models that the engine serves")
        if not self._clock_of(engine).trusted:
            raise FailedPreconditionError("CLOCK_UNKNOWN", "the engine's clock is not known yet")
        if not engine.backoff.over(now) or engine.asked >= _MOST_AT_ONCE:
            raise ResourceExhaustedError("BACKED_OFF", "the engine is not asked for a while")
        return engine

    async def _ask(self, engine: _Engine, request: HarvestRequest, count: int, timeout_s: float) -> tuple[Kept, float]:
        """Asks the engine; returns its answer, and when it was asked. Raises BackhaulError."""
        sent = self._clock.monotonic()
        engine.asked += 1
        try:
            async with asyncio.timeout(timeout_s):
                kept = await self._requests.keep(
                    model=request.model,
                    token_ids=request.token_ids[: count + 1],
                    salt=request.cache_salt,
                    rank=self._place(engine.rank),
                    left_over=self._let_loose,
                )
        except TimeoutError:
            engine.backoff.wrong(self._clock.monotonic())
            raise DeadlineExceededError("DEADLINE_EXCEEDED", "the engine did not answer in time") from None
        except UnavailableError:
            engine.backoff.wrong(self._clock.monotonic())
            raise
        finally:
            engine.asked -= 1
        self._judge(engine, kept, self._clock.monotonic() - sent)
        return kept, sent

    def _judge(self, engine: _Engine, kept: Kept, took_s: float) -> None:
        """Learns from an answer whether the guess was right."""
        engine.tp_size = kept.tp_size
        most = _MOST_WRONG_BLOCKS * engine.cached.block_size
        wrong = took_s > _SLOW_S if kept.computed_count is None else kept.computed_count > most
        if wrong:
            _log.info("the engine cached less than its events said", engine=engine.engine_id, took_s=round(took_s, 3))
            engine.backoff.wrong(self._clock.monotonic())
        else:
            engine.backoff.right()

    def _granted(self, engine: _Engine, request: HarvestRequest, count: int, kept: Kept, sent: float) -> Harvested:
        """Makes the handle. Raises BackhaulError for an answer that cannot be used."""
        size = engine.cached.block_size
        if self._engine(request.engine_id) is not engine or kept.engine_id != engine.engine_id:
            raise NotFoundError("ENGINE_UNKNOWN", "the engine has restarted")
        if not size or kept.token_count != count + 1 or len(kept.block_ids) < count // size:
            raise UnavailableError("ENGINE_FAILED", "the engine's answer does not fit what it was asked")
        now, clock = self._clock.monotonic(), self._clock_of(engine)
        if not self._owner.lease_valid(now) or self._owner.draining:
            raise FailedPreconditionError("LEASE_INVALID", "this agent's lease is not valid any more")
        kept_until = clock.earliest(sent) + self._lease_s_of(engine) if kept.expiry is None else kept.expiry
        deadline = min(kept_until - MARGIN_S, clock.earliest(now) + self._limits.claim_ttl_s)
        ttl_s = deadline - clock.latest(now)
        if not clock.trusted or ttl_s < self._limits.least_left_s:
            raise FailedPreconditionError("CLOCK_UNKNOWN", "the engine keeps blocks too shortly, or its clock jumped")
        held = _block_set(request, count, size, kept)
        self._handles[engine.engine_id, kept.hand_off_id] = now + ttl_s + MARGIN_S
        if len(self._handles) > _MOST_HANDLES:
            self._handles.popitem(last=False)
        grant = Grant(SetName(engine.engine_id, held.set_id), held, deadline, ttl_s)
        return Harvested(grant, kept.hand_off_id, kept.computed_count or 0)

    def _let_loose(self, kept: Kept) -> None:
        """Releases what nobody will read."""
        self._release(ev.SendRelease(kept.engine_id, kept.hand_off_id))

    # --- engines and their pointers

    def _known(self, rank: int, engine_id: str) -> _Engine:
        """Returns the engine of a rank; another one than before starts over."""
        known = self._by_rank.get(rank)
        if known is not None and known.engine_id == engine_id:
            return known
        if known is not None and not any(facts.engine_id == known.engine_id for facts in self._owner.engines()):
            # Nobody else ends the pointers of an engine without the connector.
            self._pointers.forget(known.engine_id)
        # Its events may have come before its name: they begin anew by themselves.
        cached = known.cached if known is not None else Cached()
        engine = self._by_rank[rank] = _Engine(engine_id, rank, cached)
        return engine

    def _place(self, rank: int) -> int | None:
        """Returns which of the server's engines a rank is; None when there is but one."""
        ranks = sorted({*self._ranks(), *self._by_rank})
        return ranks.index(rank) if len(ranks) > 1 else None

    def _engine(self, engine_id: str) -> _Engine | None:
        return next((engine for engine in self._by_rank.values() if engine.engine_id == engine_id), None)

    def _facts(self, engine_id: str) -> EngineFacts | None:
        return next((facts for facts in self._owner.engines() if facts.engine_id == engine_id), None)

    def _weights_of(self, engine_id: str) -> str:
        facts = self._facts(engine_id)
        return facts.weights_digest if facts is not None else self._weights_digest

    def _lease_s_of(self, engine: _Engine) -> float:
        facts = self._facts(engine.engine_id)
        return facts.lease_s if facts is not None else self._engine_lease_s

    def _clock_of(self, engine: _Engine) -> EngineClock:
        """The connector's pings say it better than the side channel, where there is a connector."""
        known = self._owner.clock(engine.engine_id)
        return known if known is not None and known.trusted else engine.clock

    def _add(self, engine: _Engine, pointer: BlockSet) -> None:
        if self._owner.draining:
            return
        new, gone = engine.pointers.add(pointer, self._clock.monotonic())
        if new:
            self._pointers.publish(engine.engine_id, pointer)
        self._remove(engine, gone)

    def _remove(self, engine: _Engine, pointers: Sequence[BlockSet]) -> None:
        for pointer in pointers:
            self._pointers.unpublish(engine.engine_id, pointer)


def _identity(request: HarvestRequest) -> bytes:
    weights = request.weights_digest
    return identity_of(weights_digest=weights, adapter="", cache_salt=request.cache_salt, scope=request.scope)


def _block_set(request: HarvestRequest, count: int, block_size: int, kept: Kept) -> BlockSet:
    """Returns what the handle covers: the whole blocks, without the token that the engine had to compute."""
    identity = _identity(request)
    chain = AnchorChain(identity, stride_of(block_size))
    chain.extend(request.token_ids[:count])
    anchors = Anchors.of(chain, identity)
    block_count = count // block_size
    return BlockSet(
        set_id=request.set_id,
        scope=request.scope,
        keys=(),
        params={**kept.params, "remote_block_ids": [kept.block_ids[:block_count]], "remote_num_tokens": count},
        token_count=count,
        block_count=block_count,
        identity=identity,
        stride=anchors.stride,
        spacing=anchors.spacing,
        anchors=anchors.digests,
    )
