"""Fresh handles for what engines still cache of turns before, for turns that have nothing to claim.

Costs a turn that is cold in the end no more than the budget; whatever goes wrong is a miss with a reason.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backhaul_common.clock import Clock
from backhaul_common.errors import BackhaulError, DeadlineExceededError
from backhaul_common.metering import Counter
from backhaul_router import instruments
from backhaul_router.core import misses
from backhaul_router.core.body import TurnBody
from backhaul_router.core.candidates import Pointer, likeliest_first
from backhaul_router.core.claims import Claim, Grant, Harvest, KeptBlocks
from backhaul_router.core.kinds import text_only, tokens_certain
from backhaul_router.core.legs import is_object
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.routing.demand import Demand, Held
from backhaul_router.core.routing.planner import Plan, Planner
from backhaul_router.prompt_tokens import PromptTokens
from backhaul_router.turn_spans import TurnTrace
from backhaul_router.warm import Warm, holder_of

_TRIES = 2
"""Owners asked for one turn."""

_MOST_TOKEN = 2**31 - 1
"""Nothing larger can be asked for, and no model has it."""


class Owner(Protocol):
    """Who has engines make fresh handles."""

    async def harvest(self, harvest: Harvest, *, timeout_s: float) -> Grant:
        """Raises BackhaulError; then nothing stays kept."""
        ...

    def give_back(self, source: Claim | KeptBlocks) -> None:
        """Gives back in the background what nothing reads."""
        ...


@dataclass(frozen=True, slots=True)
class Chance:
    """A fresh handle, and the way that it is for."""

    plan: Plan
    warm: Warm


class SecondChances:
    """Asks for fresh handles, for one turn after the other."""

    def __init__(
        self,
        *,
        owner: Owner,
        tokens: PromptTokens,
        table: NodeTable,
        planner: Planner,
        clock: Clock,
        budget_s: float,
        keep_constraints: Collection[str] = (),
    ) -> None:
        """``budget_s`` 0 gives none; ``keep_constraints`` are those of `Policy`."""
        self._owner = owner
        self._tokens = tokens
        self._table = table
        self._planner = planner
        self._clock = clock
        self._budget_s = budget_s
        self._keep_constraints = tuple(keep_constraints)
        self._counted = Counter(instruments.SECOND_CHANCES)

    async def harvest_for(
        self,
        body: TurnBody,
        pointers: Sequence[Pointer],
        *,
        demand: Demand,
        scope: str,
        cache_salt: str,
        headers: Mapping[str, str],
        trace: TurnTrace,
    ) -> Chance | str:
        """Returns a fresh handle for a turn, or the reason why there is none.

        Empty when nobody could be asked, or it would not pay.
        """
        if not self._budget_s or not text_only(body):
            return ""
        deadline = self._clock.monotonic() + self._budget_s
        able = self._able(body, demand, pointers)
        if not able:
            return ""
        miss = ""
        with trace.step("second chance"):
            tokens = await self._tokens.of(body, next(iter(able.values())).reader.node, headers, deadline)
            if not tokens or not 0 <= min(tokens) <= max(tokens) <= _MOST_TOKEN:
                self._counted.add(1, misses.NO_TOKENS)
                return misses.NO_TOKENS
            for pointer in likeliest_first([*able], tokens)[:_TRIES]:
                way = able[pointer]
                harvest = Harvest(
                    address=way.decode.node.agent_address,
                    set_id=pointer.set_id,
                    engine_id=pointer.engine_id,
                    scope=scope,
                    weights_digest=way.reader.weights_digest,
                    model=body.model,
                    cache_salt=cache_salt,
                    token_ids=tokens,
                )
                found = await self._harvest(harvest, way, deadline, pointer.traceparent)
                if not isinstance(found, str):
                    self._counted.add(1, instruments.GRANTED)
                    return found
                self._counted.add(1, found.removeprefix(misses.HARVEST))
                miss = found
        return miss

    async def _harvest(self, harvest: Harvest, way: Plan, deadline: float, origin: str) -> Chance | str:
        left = deadline - self._clock.monotonic()
        if left <= 0:
            return misses.HARVEST_TIMEOUT
        try:
            grant = await self._owner.harvest(harvest, timeout_s=left)
        except DeadlineExceededError:
            return misses.HARVEST_TIMEOUT
        except BackhaulError as error:
            return misses.harvest_refused(error.reason)
        # An engine without the connector takes all blocks of a handle for the prompt's beginning: the prompt must be
        # longer, and be given as the very tokens of which the handle was made.
        tokens = harvest.token_ids if way.reader.node.stock else None
        fits = tokens is None or grant.token_count < len(tokens)
        if not is_object(grant.handle) or grant.token_count <= 0 or not fits:
            self._owner.give_back(grant.source)
            return misses.harvest_refused("bad_handle")
        return Chance(way, Warm(grant, way.reader, way.decode, tokens, origin))

    def _able(self, body: TurnBody, demand: Demand, pointers: Iterable[Pointer]) -> dict[Pointer, Plan]:
        """Returns the pointers that lead somewhere, each with who would read there, if that pays."""
        certain = tokens_certain(body) and not any(part in body.model.lower() for part in self._keep_constraints)
        found: dict[Pointer, Plan] = {}
        for pointer in pointers:
            holder = holder_of(self._table, pointer)
            if holder is None or holder.engine is None or not holder.engine.second_chance:
                continue
            # How much is cached is not always known: then as much as there may be.
            held = Held(holder, pointer.token_count or demand.token_count)
            way = self._planner.reading(replace(demand, held=held), tokens_certain=certain)
            if way is not None:
                found[pointer] = way
        return found
