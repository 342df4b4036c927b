"""Finds and claims the block set of the turn before, within a budget. Whatever goes wrong is a miss with a reason.

When there is nothing to claim, but something that may still be cached, a second chance is asked for.
"""

import uuid
from collections.abc import Mapping, Sequence
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
from backhaul_router.core import misses
from backhaul_router.core.body import TurnBody
from backhaul_router.core.candidates import Pointer, distinct, longest_match
from backhaul_router.core.claims import Claim, Grant, KeptBlocks
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.legs import is_object
from backhaul_router.core.lookup import TurnKeys
from backhaul_router.core.nodes import Node, NodeTable, Role, compatible
from backhaul_router.core.picking import Load, pick_reader, readers
from backhaul_router.observing import TurnTrace
from backhaul_router.prompt_tokens import PromptTokens
from backhaul_router.second_chances import SecondChances
from backhaul_router.warm import Warm, holder_of

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


class Lookups:
    """Looks up and claims, for one turn after the other."""

    def __init__(
        self,
        *,
        registry: Registry,
        owner: Owner,
        tokens: PromptTokens,
        second_chances: SecondChances,
        table: NodeTable,
        load: Load,
        fresh: FreshKeys,
        clock: Clock,
        budget_s: float,
    ) -> None:
        self._registry = registry
        self._owner = owner
        self._tokens = tokens
        self._second_chances = second_chances
        self._table = table
        self._load = load
        self._fresh = fresh
        self._clock = clock
        self._budget_s = budget_s

    async def claim_for(
        self,
        body: TurnBody,
        *,
        scope: str,
        cache_salt: str,
        keys: TurnKeys,
        headers: Mapping[str, str],
        trace: TurnTrace,
    ) -> Warm | str:
        """Returns granted blocks for a turn, or the reason why there are none.

        ``cache_salt`` is that of the legs; ``headers`` go to an engine that is asked for the prompt's tokens.
        """
        deadline = self._clock.monotonic() + self._budget_s
        try:
            with trace.step("lookup"):
                pointers = await self._find(scope, keys, deadline)
        except DeadlineExceededError:
            return misses.LOOKUP_TIMEOUT
        except BackhaulError as error:
            _log.debug("lookup failed", reason=error.reason)
            return misses.REGISTRY_UNAVAILABLE
        candidates = distinct(pointers)
        retained = [pointer for pointer in candidates if not pointer.cached]
        cached = [pointer for pointer in candidates if pointer.cached]
        found: Warm | str = misses.NOT_FOUND if keys.continues else misses.FIRST_TURN
        if retained:
            chosen = await self._choose(body, retained, headers, deadline)
            if isinstance(chosen, str):
                found = chosen
            else:
                found = await self._claim(*chosen, scope=scope, deadline=deadline, trace=trace)
        if not isinstance(found, str) or not cached or found not in misses.SECOND_CHANCE:
            return found
        second = await self._second_chances.harvest_for(
            body, cached, scope=scope, cache_salt=cache_salt, headers=headers, trace=trace
        )
        return second or found

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
        self, body: TurnBody, candidates: Sequence[Pointer], headers: Mapping[str, str], deadline: float
    ) -> tuple[Pointer, Node, Node] | str:
        """Returns a pointer, the node that will read and the node that holds."""
        held = [(pointer, holder) for pointer in candidates if (holder := holder_of(self._table, pointer))]
        if not held:
            return misses.OWNER_UNAVAILABLE
        readable = [(pointer, holder) for pointer, holder in held if self._readers(body.model, holder)]
        if not readable:
            return misses.INCOMPATIBLE
        pointer, holder = readable[0]
        if len(readable) > 1:
            reader = self._readers(body.model, holder)[0]
            tokens = await self._tokens.of(body, reader, headers, deadline)
            if not tokens:
                return misses.AMBIGUOUS
            match = longest_match((pointer for pointer, _ in readable), tokens)
            if match is None:
                return misses.NO_MATCH
            pointer, holder = next(pair for pair in readable if pair[0] is match)
        able = readers(self._table, body.model, holder)
        if not able:
            return misses.NO_CONNECTOR
        prefill = pick_reader(self._load, able, holder)
        return misses.PAIR_APART if prefill is None else (pointer, prefill, holder)

    async def _claim(
        self, pointer: Pointer, prefill: Node, holder: Node, *, scope: str, deadline: float, trace: TurnTrace
    ) -> Warm | str:
        left = deadline - self._clock.monotonic()
        if left <= 0:
            return misses.LOOKUP_TIMEOUT
        claim = Claim(
            address=holder.agent_address,
            request_id=str(uuid.uuid4()),
            set_id=pointer.set_id,
            engine_id=pointer.engine_id,
            scope=scope,
            weights_digest=prefill.weights_digest,
        )
        try:
            with trace.step("claim"):
                grant = await self._owner.claim(claim, timeout_s=left)
        except DeadlineExceededError:
            return misses.LOOKUP_TIMEOUT
        except _REFUSALS as error:
            return misses.claim_refused(error.reason)
        except BackhaulError:
            return misses.OWNER_UNAVAILABLE
        if not is_object(grant.handle):
            self._owner.give_back(grant.source)
            return misses.claim_refused("bad_handle")
        return Warm(grant, prefill, holder)

    def _readers(self, model: str, holder: Node) -> list[Node]:
        return [node for node in self._table.ready(Role.PREFILL, model) if compatible(node, holder)]
