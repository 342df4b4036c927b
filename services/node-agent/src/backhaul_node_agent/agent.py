"""The agent's centre: passes events to the owner and carries out, in order, what the owner wants done."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import (
    AbortedError,
    BackhaulError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from backhaul_connector import wire
from backhaul_node_agent.core import events as ev
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.granting import ClaimRequest, Grant, Refusal
from backhaul_node_agent.core.owner import HeldSet, Owner
from backhaul_node_agent.core.releasing import ReleaseOutcome
from backhaul_node_agent.observing import AgentObserver

_log = structlog.get_logger(__name__)

FLUSH_S = 0.02
"""How long a claim waits until the connector's socket has taken the notice of it."""

_ERRORS: dict[str, type[BackhaulError]] = {
    "SET_UNKNOWN": NotFoundError,
    "ENGINE_UNKNOWN": NotFoundError,
    "NOT_A_HAND_OFF": InvalidArgumentError,
    "CLAIM_RETURNED": AbortedError,
    "REQUEST_ID_REUSED": InvalidArgumentError,
}


class Connectors(Protocol):
    """Connections to the engines' connectors."""

    def tell(self, engine_id: str, message: wire.Claimed | wire.Returned) -> None: ...

    async def flushed(self, engine_id: str, timeout_s: float) -> bool: ...


class Index(Protocol):
    """Pointers in the registry."""

    def open(self, engine_id: str) -> None: ...

    def publish(self, engine_id: str, block_set: BlockSet) -> None: ...

    def unpublish(self, engine_id: str, block_set: BlockSet) -> None: ...

    def forget(self, engine_id: str) -> None: ...

    def let_go(self, engine_id: str, block_set: BlockSet) -> None: ...

    def lease_lost(self) -> None: ...


class Notifier(Protocol):
    """NIXL notifications to the engines."""

    @property
    def available(self) -> bool: ...

    @property
    def starting(self) -> bool: ...

    def send(self, effect: ev.SendRelease | ev.SendRenewal) -> None: ...

    def forget(self, engine_id: str) -> None: ...


class Agent:
    """Everything that changes the owner goes through here; nothing here waits but a claim."""

    def __init__(
        self,
        *,
        owner: Owner,
        clock: Clock,
        connectors: Connectors,
        index: Index,
        notifier: Notifier,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when what the directory should say may have changed."""
        self._owner = owner
        self._clock = clock
        self._connectors = connectors
        self._index = index
        self._notifier = notifier
        self._on_change = on_change
        self._observer = AgentObserver()

    def hear(self, event: ev.Event) -> None:
        """Takes in what happened."""
        now = self._clock.monotonic()
        match event:
            case ev.PointersWritten():
                self._observer.published(self._owner.publish_lags_s(event, now))
            case ev.DeadlinesConfirmed():
                self._observer.confirmed(event)
            case _:
                pass
        self._perform(self._owner.handle(event, now))
        match event:
            case ev.EngineConnected():
                self._index.open(event.facts.engine_id)
                self._on_change()
            case ev.ConnectorLost() | ev.ReplayFinished() | ev.WeightsKnown() | ev.EngineGone() | ev.DrainAsked():
                self._on_change()
            case ev.LeaseLost():
                if not self._owner.draining:
                    _log.warning("lease lost: nothing is granted until the node has joined again")
                self._index.lease_lost()
            case _:
                pass

    async def claim(self, request: ClaimRequest) -> Grant:
        """Grants a set to a router.

        Raises BackhaulError with the reasons of `ClaimBlockSet`. Cancellation takes the grant back.
        """
        try:
            grant = await self._claim(request)
        except BackhaulError as error:
            self._observer.refused(error.reason)
            raise
        self._observer.granted()
        return grant

    async def _claim(self, request: ClaimRequest) -> Grant:
        outcome, effects = self._owner.claim(request, self._clock.monotonic())
        self._perform(effects)
        if isinstance(outcome, Refusal):
            raise _error(outcome)
        answered = False
        try:
            # A successor of this agent must learn of the grant from the connector, or it may grant the set again.
            if not await self._connectors.flushed(request.engine_id, FLUSH_S):
                raise _error(Refusal("CONNECTOR_AWAY", "the engine's connector could not be told of the claim"))
            refusal = self._owner.confirm(request, self._clock.monotonic())
            if refusal is not None:
                raise _error(refusal)
            answered = True
        finally:
            if not answered:
                self._perform(self._owner.abandon(request.request_id, self._clock.monotonic()))
        return outcome

    def give_back(self, request_id: str) -> None:
        """Takes a claim back that its router did not use."""
        self._perform(self._owner.give_back(request_id, self._clock.monotonic()))

    def release(self, set_ids: Sequence[str], *, scope: str = "", keys: Collection[str] = ()) -> ReleaseOutcome:
        """Releases sets, those behind a fence under one of the keys included.

        Raises UnavailableError (NIXL_STARTING), FailedPreconditionError (NIXL_MISSING) when there are any.
        """
        ids = [*set_ids, *self._owner.fenced(scope, keys)]
        if ids:
            self._need_nixl()
        outcome, effects = self._owner.release(ids, self._clock.monotonic())
        self._perform(effects)
        return outcome

    def release_hand_off(self, engine_id: str, hand_off_id: str) -> None:
        """Frees a hand-off that nobody will read.

        Raises NotFoundError (ENGINE_UNKNOWN), InvalidArgumentError (NOT_A_HAND_OFF), UnavailableError (NIXL_STARTING),
        FailedPreconditionError (NIXL_MISSING).
        """
        self._need_nixl()
        outcome = self._owner.release_hand_off(engine_id, hand_off_id)
        if isinstance(outcome, str):
            raise _error(Refusal(outcome, "no such hand-off here"))
        self._perform(outcome)

    def renew(self, set_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Asks the engines for more time; returns the ids asked for and those unknown.

        Raises UnavailableError (NIXL_STARTING), FailedPreconditionError (NIXL_MISSING).
        """
        self._need_nixl()
        renewed, unknown, effects = self._owner.renew(set_ids)
        self._perform(effects)
        return renewed, unknown

    def drain(self) -> int:
        """Drains the node; returns how many sets are left."""
        self.hear(ev.DrainAsked())
        return self._owner.set_count

    def awaited_count(self) -> int:
        """Returns how many sets a drain waits for."""
        return self._owner.awaited_count(can_release=self._notifier.available or self._notifier.starting)

    def sets(self) -> list[HeldSet]:
        """Returns all sets, by set_id."""
        held = self._owner.sets(self._clock.monotonic())
        return sorted(held, key=lambda one: (one.name.set_id, one.name.engine_id))

    def _need_nixl(self) -> None:
        if self._notifier.starting:
            raise UnavailableError("NIXL_STARTING", "nixl is not ready yet: try again in a moment")
        if not self._notifier.available:
            raise FailedPreconditionError("NIXL_MISSING", "this agent runs without nixl and cannot tell engines")

    def _perform(self, effects: Sequence[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Publish():
                    self._index.publish(effect.engine_id, effect.block_set)
                case ev.Unpublish():
                    self._index.unpublish(effect.engine_id, effect.block_set)
                case ev.LetGo():
                    self._index.let_go(effect.engine_id, effect.block_set)
                case ev.ForgetEngine():
                    self._index.forget(effect.engine_id)
                    self._notifier.forget(effect.engine_id)
                case ev.TellClaimed():
                    self._connectors.tell(effect.engine_id, wire.Claimed(set_id=effect.set_id))
                case ev.TellReturned():
                    self._connectors.tell(effect.engine_id, wire.Returned(set_id=effect.set_id))
                case ev.SendRelease() | ev.SendRenewal():
                    self._notifier.send(effect)
                case ev.Decided():
                    self._observer.decided(effect)
                    _say(effect)


def _say(decided: ev.Decided) -> None:
    if decided.reason is ev.Reason.UNCONFIRMED:
        _log.warning(
            "an engine is asked to keep block sets longer, but does not confirm that: they end at its own deadline",
            engine=decided.engine_id,
            set_id=decided.set_id,
        )
    else:
        _log.debug("retention", engine=decided.engine_id, set_id=decided.set_id, decision=decided.reason.value)


def _error(refusal: Refusal) -> BackhaulError:
    return _ERRORS.get(refusal.reason, FailedPreconditionError)(refusal.reason, refusal.message)
