"""Finds and claims the block set of the turn before, within a budget. Whatever goes wrong is a miss with a reason."""

import uuid
from collections.abc import Mapping, Sequence
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
from backhaul_router.core import misses
from backhaul_router.core.body import TurnBody
from backhaul_router.core.candidates import Pointer, distinct, longest_match
from backhaul_router.core.claims import Claim, Grant, KeptBlocks
from backhaul_router.core.engines import EngineError
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.legs import is_object, prompt_tokens_in, tokenize_body
from backhaul_router.core.lookup import TurnKeys
from backhaul_router.core.nodes import Node, NodeState, NodeTable, Role, compatible
from backhaul_router.core.picking import Load, pick_reader, readers
from backhaul_router.observing import TurnTrace

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

    def give_back(self, claim: Claim) -> None:
        """Returns a claim in the background."""
        ...

    def release(self, kept: KeptBlocks) -> None:
        """Has a hand-off freed that no decode engine was told of, in the background."""
        ...


class Tokenizer(Protocol):
    """Turns prompts into tokens."""

    async def tokenize(self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> list[int]:
        """Raises EngineError; empty when refused."""
        ...


@dataclass(frozen=True, slots=True)
class Warm:
    """A granted block set and the nodes that go with it."""

    grant: Grant
    prefill: Node
    holder: Node


class Lookups:
    """Looks up and claims, for one turn after the other."""

    def __init__(
        self,
        *,
        registry: Registry,
        owner: Owner,
        tokenizer: Tokenizer,
        table: NodeTable,
        load: Load,
        fresh: FreshKeys,
        clock: Clock,
        budget_s: float,
    ) -> None:
        self._registry = registry
        self._owner = owner
        self._tokenizer = tokenizer
        self._table = table
        self._load = load
        self._fresh = fresh
        self._clock = clock
        self._budget_s = budget_s

    async def claim_for(
        self, body: TurnBody, *, scope: str, keys: TurnKeys, headers: Mapping[str, str], trace: TurnTrace
    ) -> Warm | str:
        """Returns a granted block set for a turn, or the reason why there is none.

        ``headers`` go to an engine that is asked for the prompt's tokens.
        """
        deadline = self._clock.monotonic() + self._budget_s
        try:
            with trace.step("lookup"):
                pointers = await self._find(scope, keys.find, deadline)
        except DeadlineExceededError:
            return misses.LOOKUP_TIMEOUT
        except BackhaulError as error:
            _log.debug("lookup failed", reason=error.reason)
            return misses.REGISTRY_UNAVAILABLE
        candidates = distinct(pointers)
        if not candidates:
            return misses.NOT_FOUND if keys.continues else misses.FIRST_TURN
        chosen = await self._choose(body, candidates, headers, deadline)
        if isinstance(chosen, str):
            return chosen
        return await self._claim(*chosen, scope=scope, deadline=deadline, trace=trace)

    async def _find(self, scope: str, keys: Sequence[str], deadline: float) -> list[Pointer]:
        """Finds pointers; waits for those of a turn that has only just ended."""
        pause = _FIRST_PAUSE_S
        while True:
            left = deadline - self._clock.monotonic()
            pointers = await self._registry.find(scope, keys, timeout_s=max(left, 0.0))
            missing = self._fresh.missing(scope, keys, {pointer.key for pointer in pointers})
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
        held = [(pointer, holder) for pointer in candidates if (holder := self._holder(pointer))]
        if not held:
            return misses.OWNER_UNAVAILABLE
        readable = [(pointer, holder) for pointer, holder in held if self._readers(body.model, holder)]
        if not readable:
            return misses.INCOMPATIBLE
        pointer, holder = readable[0]
        if len(readable) > 1:
            reader = self._readers(body.model, holder)[0]
            tokens = await self._tokens(body, reader, headers, deadline)
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

    async def _tokens(self, body: TurnBody, node: Node, headers: Mapping[str, str], deadline: float) -> list[int]:
        given = prompt_tokens_in(body)
        if given is not None:
            return given
        left = deadline - self._clock.monotonic()
        if left <= 0:
            return []
        try:
            return await self._tokenizer.tokenize(
                f"{node.engine_url}/tokenize", tokenize_body(body), headers, timeout_s=left
            )
        except EngineError:
            return []

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
            self._owner.give_back(claim)
            return misses.claim_refused("bad_handle")
        return Warm(grant, prefill, holder)

    def _holder(self, pointer: Pointer) -> Node | None:
        node = self._table.get(pointer.node_id)
        usable = node is not None and node.role is Role.DECODE and node.state is NodeState.READY
        return node if usable and node is not None and node.engine(pointer.engine_id) else None

    def _readers(self, model: str, holder: Node) -> list[Node]:
        return [node for node in self._table.ready(Role.PREFILL, model) if compatible(node, holder)]
