"""Finds and claims the block set of the turn before, within a budget. Whatever goes wrong is a miss with a reason."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import (
    AbortedError,
    BackhaulError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from backhaul_common.metering import Counter, Histogram
from backhaul_router import instruments
from backhaul_router.core import misses
from backhaul_router.core.body import TurnBody
from backhaul_router.core.candidates import Pointer, distinct, longest_match
from backhaul_router.core.claims import Claim, Grant, KeptBlocks
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.legs import is_object
from backhaul_router.core.lookup import TurnKeys
from backhaul_router.core.nodes import NodeTable, Role, compatible
from backhaul_router.core.routing.target import Target
from backhaul_router.prompt_tokens import PromptTokens, can_be_told
from backhaul_router.turn_spans import TurnTrace
from backhaul_router.warm import holder_of

_log = structlog.get_logger(__name__)

_FIRST_PAUSE_S = 0.004
_CLAIM_RESERVE_S = 0.01
"""Part of the budget that waiting for a publish leaves for the claim."""

_REFUSALS = (NotFoundError, FailedPreconditionError, AbortedError, InvalidArgumentError)


class Registry(Protocol):
    """Where pointers are found."""

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
        """Raises BackhaulError."""
        ...


class Owner(Protocol):
    """Who grants block sets, and has engines free what nobody will read."""

    async def claim(self, claim: Claim, *, timeout_s: float) -> Grant:
        """Raises BackhaulError; a claim of unknown outcome is returned by the implementation."""
        ...

    def give_back(self, source: Claim | KeptBlocks) -> None:
        """Gives back in the background what nothing reads."""
        ...

    def release(self, kept: KeptBlocks) -> None:
        """Has a hand-off freed that no decode engine was told of, in the background."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup came to."""

    miss: str = ""
    """Why nothing retained was found that can be reused; empty when something was."""
    pointer: Pointer | None = None
    """What is retained; None: nothing."""
    holder: Target | None = None
    """Who retains it."""
    proved: bool = False
    """Whether the messages of the turn that retained it are known to be those of this one, but for its answer."""
    cached: tuple[Pointer, ...] = ()
    """What decode engines merely may still cache."""
    deadline: float = 0.0
    """By the router's clock: until when a claim may take."""


class Lookups:
    """Looks up and claims, for one turn after the other."""

    def __init__(
        self,
        *,
        registry: Registry,
        owner: Owner,
        tokens: PromptTokens,
        table: NodeTable,
        fresh: FreshKeys,
        clock: Clock,
        budget_s: float,
    ) -> None:
        self._registry = registry
        self._owner = owner
        self._tokens = tokens
        self._table = table
        self._fresh = fresh
        self._clock = clock
        self._budget_s = budget_s
        self._lookups = Histogram(instruments.LOOKUP_DURATION)
        self._claims = Counter(instruments.CLAIMS)
        self._claiming = Histogram(instruments.CLAIM_DURATION)

    async def find(
        self, body: TurnBody, *, scope: str, keys: TurnKeys, headers: Mapping[str, str], trace: TurnTrace
    ) -> Found:
        """Returns what a turn can reuse. ``headers`` go to an engine that is asked for the prompt's tokens."""
        deadline = self._clock.monotonic() + self._budget_s
        try:
            with trace.step("lookup"), self._timed(self._lookups):
                pointers = await self._find(scope, keys, deadline)
        except DeadlineExceededError:
            return Found(misses.LOOKUP_TIMEOUT)
        except BackhaulError as error:
            with trace.current():
                _log.debug("lookup failed", reason=error.reason)
            return Found(misses.REGISTRY_UNAVAILABLE)
        cached = tuple(pointer for pointer in distinct(pointers) if pointer.cached)
        retained = [pointer for pointer in distinct(pointers) if not pointer.cached]
        if not retained:
            return Found(misses.NOT_FOUND if keys.continues else misses.FIRST_TURN, cached=cached)
        chosen = await self._choose(body, retained, keys.newest_of(pointers), headers, deadline, trace)
        if isinstance(chosen, str):
            return Found(chosen, cached=cached)
        pointer, holder = chosen
        proved = any(_same_set(pointer, other) and keys.proves(other.key) for other in pointers)
        return Found("", pointer, holder, proved, cached, deadline)

    async def _find(self, scope: str, keys: TurnKeys, deadline: float) -> list[Pointer]:
        """Finds pointers; waits for those of a turn that has only just ended, as long as it may."""
        pause = _FIRST_PAUSE_S
        pointers: list[Pointer] | None = None
        while True:
            left = deadline - self._clock.monotonic() - (_CLAIM_RESERVE_S if pointers else 0.0)
            try:
                pointers = await self._registry.find(scope, keys.find, timeout_s=max(left, 0.0))
            except BackhaulError:
                if not pointers:
                    raise
                return pointers
            missing = self._fresh.missing(scope, keys.turns, {pointer.key for pointer in pointers})
            if not missing:
                return pointers
            if deadline - self._clock.monotonic() < pause + _CLAIM_RESERVE_S:
                self._fresh.forget(scope, missing)
                return pointers
            await self._clock.sleep(pause)
            pause *= 2

    async def _choose(
        self,
        body: TurnBody,
        candidates: Sequence[Pointer],
        newest: Sequence[Pointer],
        headers: Mapping[str, str],
        deadline: float,
        trace: TurnTrace,
    ) -> tuple[Pointer, Target] | str:
        """Returns a pointer and who holds what it names. ``newest``: what the latest turn left that is known."""
        held = [(pointer, holder) for pointer in candidates if (holder := holder_of(self._table, pointer))]
        if not held:
            return misses.OWNER_UNAVAILABLE
        if not can_be_told(body):
            held = [pair for pair in held if any(_same_set(pair[0], pointer) for pointer in newest)] or held
        if len(held) == 1:
            return held[0]
        with trace.step("tokenize"):
            tokens = await self._tokens_of(body, held[0][1], headers, deadline)
        if not tokens:
            return misses.AMBIGUOUS
        match = longest_match((pointer for pointer, _ in held), tokens)
        if match is None:
            return misses.NO_MATCH
        return next(pair for pair in held if pair[0] is match)

    async def _tokens_of(
        self, body: TurnBody, holder: Target, headers: Mapping[str, str], deadline: float
    ) -> Sequence[int]:
        """Has a prefill engine tokenize if there is one: the decode engine has better things to do."""
        prefills = self._table.ready(Role.PREFILL, body.model)
        asked = next((node for node in prefills if compatible(node, holder.node)), holder.node)
        return await self._tokens.of(body, asked, headers, deadline)

    async def claim(self, found: Found, prefill: Target, *, scope: str, trace: TurnTrace) -> Grant | str:
        """Claims what was found for a prefill engine; returns the grant, or the reason why there is none."""
        outcome = await self._claim(found, prefill, scope=scope, trace=trace)
        result = outcome.removeprefix(misses.CLAIM) if isinstance(outcome, str) else instruments.GRANTED
        self._claims.add(1, result)
        return outcome

    async def _claim(self, found: Found, prefill: Target, *, scope: str, trace: TurnTrace) -> Grant | str:
        assert found.pointer is not None
        assert found.holder is not None
        left = found.deadline - self._clock.monotonic()
        if left <= 0:
            return misses.LOOKUP_TIMEOUT
        claim = Claim(
            address=found.holder.node.agent_address,
            request_id=str(uuid.uuid4()),
            set_id=found.pointer.set_id,
            engine_id=found.pointer.engine_id,
            scope=scope,
            weights_digest=prefill.weights_digest,
        )
        try:
            with trace.step("claim"), self._timed(self._claiming):
                grant = await self._owner.claim(claim, timeout_s=left)
                if not is_object(grant.handle):
                    self._owner.give_back(grant.source)
                    return misses.claim_refused("bad_handle")
        except DeadlineExceededError:
            return misses.LOOKUP_TIMEOUT
        except _REFUSALS as error:
            return misses.claim_refused(error.reason)
        except BackhaulError:
            return misses.OWNER_UNAVAILABLE
        return grant

    @contextmanager
    def _timed(self, histogram: Histogram) -> Iterator[None]:
        began = self._clock.monotonic()
        try:
            yield
        finally:
            histogram.record(self._clock.monotonic() - began)


def _same_set(one: Pointer, other: Pointer) -> bool:
    return (one.engine_id, one.set_id) == (other.engine_id, other.set_id)
