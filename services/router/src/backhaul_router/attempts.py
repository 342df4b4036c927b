"""Runs the legs of a turn, and again when that may help."""

from contextlib import AsyncExitStack
from dataclasses import replace

from backhaul_router.core import misses
from backhaul_router.core.engines import NOT_READ, RETRYABLE, EngineError, Failure, failure_in
from backhaul_router.core.errors import ApiError
from backhaul_router.core.health.retries import RetryBudget
from backhaul_router.core.legs import HandOff
from backhaul_router.core.nodes import Node, NodeTable, Role
from backhaul_router.core.routing.live import Live
from backhaul_router.core.routing.planner import Plan, Planner
from backhaul_router.core.turn import Route
from backhaul_router.legs import Legs
from backhaul_router.observing import TurnObserver
from backhaul_router.ports import Policy
from backhaul_router.running_turn import Delivery, HandedOver, Turn


class Attempts:
    """Runs turns over the nodes of one table."""

    def __init__(
        self,
        *,
        legs: Legs,
        table: NodeTable,
        planner: Planner,
        live: Live,
        retries: RetryBudget,
        policy: Policy,
        observer: TurnObserver,
    ) -> None:
        self._legs = legs
        self._table = table
        self._planner = planner
        self._live = live
        self._retries = retries
        self._policy = policy
        self._observer = observer

    async def deliver(self, turn: Turn, stack: AsyncExitStack) -> Delivery:
        """Goes the turn's way; when decode fails before anything of its answer is there, a cold one, once.

        The decode leg lasts until ``stack`` is left. Raises ApiError.
        """
        self._retries.began()
        for last in (False, True):
            handed = await self._hand_over(turn)
            attempt = await stack.enter_async_context(AsyncExitStack())
            try:
                delivery = await self._legs.decode(turn, handed, attempt)
            except EngineError as error:
                if not self._again(turn, handed, error.failure, last=last) or last:
                    raise error.as_api_error("decode") from error
            else:
                failure = failure_in(delivery.stream.status)
                if failure is None:
                    self._went_well(turn, handed)
                if failure is None or not self._again(turn, handed, failure, last=last) or last:
                    return delivery
            await attempt.aclose()
            self._go_cold(turn, misses.DECODE_FAILED)
        raise AssertionError("unreachable")

    async def prepare(self, turn: Turn) -> HandedOver:
        """Goes the turn's way as far as its decode leg, which somebody else sends, and once. Raises ApiError."""
        self._retries.began()
        return await self._hand_over(turn)

    def sent_elsewhere(self, turn: Turn, handed: HandedOver, failure: Failure | None) -> None:
        """Takes note of how a decode leg went that somebody else sent."""
        if failure is None:
            self._went_well(turn, handed)
        else:
            with turn.trace.current():
                self._live.breakers.failed(handed.plan.decode.node, failure)

    # Prefill

    async def _hand_over(self, turn: Turn) -> HandedOver:
        """Runs the prefill leg, if the turn's way has one, and again if that may help."""
        for last in (False, True):
            plan = self._next(turn)
            if plan.prefill is None:
                return self._to_decode(turn, plan)
            if self._unreadable(turn, plan.prefill.node):
                return self._to_decode(turn, self._decode_only(turn))
            try:
                # The decode leg counts from now on: turns that come meanwhile shall not all go to the same engine.
                with self._live.load.running(plan.decode):
                    hand = await self._legs.prefill(turn, plan.prefill, expected_s=plan.estimate.prefill_s)
            except EngineError as error:
                again = self._repeat_prefill(turn, plan.prefill.node, error.failure, last=last)
                self._go_cold(turn, misses.PREFILL_FAILED if turn.warm else turn.outcome.miss)
                if not last and again:
                    continue
                if error.failure in RETRYABLE and self._policy.prefill_fallback == "decode":
                    return self._to_decode(turn, self._decode_only(turn))
                raise error.as_api_error("prefill") from error
            return self._accept(turn, plan, hand)
        raise AssertionError("unreachable")

    def _repeat_prefill(self, turn: Turn, node: Node, failure: Failure, *, last: bool) -> bool:
        """Notes a failed prefill leg. Tells whether it may be repeated, cold; the ``last`` may not."""
        self._note(turn, node, failure)
        if turn.warm:
            if failure in NOT_READ or failure is Failure.TIMEOUT:
                turn.unread.append((node, turn.warm.holder.node))
            return True
        if last:
            # What is not repeated must not count as if it was.
            return False
        if failure is Failure.DISCONNECTED or (failure in RETRYABLE and self._others(turn, Role.PREFILL)):
            return self._retries.allowed()
        return False

    def _accept(self, turn: Turn, plan: Plan, hand: HandOff) -> HandedOver:
        """Takes the prefill engine's answer."""
        params, verdict = hand.params, hand.verdict
        turn.prefilled_s = turn.trace.elapsed_s
        turn.outcome.fallback = False
        if plan.prefill is not None:
            turn.untold = plan.prefill.node, hand
        if turn.warm and turn.warm.token_ids is not None and verdict is None:
            turn.outcome.count_read(turn.warm.grant.token_count)
        elif turn.warm and verdict is None:
            # Nobody says that the blocks were verified: nothing computed from them may go on.
            turn.outcome.cold(misses.NO_CONNECTOR)
            params = None
        elif turn.warm and verdict is not None:
            if not verdict.spent:
                self._legs.give_back(turn, turn.warm.grant)
            if verdict.refused:
                turn.outcome.cold(misses.handle_refused(verdict.refused))
            elif not verdict.read:
                turn.outcome.cold(misses.NOT_NEEDED)
            else:
                self._live.pairs.read_worked(turn.warm.prefill.node, turn.warm.holder.node)
        turn.outcome.prompt_token_count = hand.usage.token_count if hand.usage else 0
        if verdict is not None:
            turn.outcome.count(verdict)
        if params is None:
            self._observer.missing_hand_off()
            # The decode engine computes what the prefill engine was to compute.
            return HandedOver(plan, alone_s=plan.estimate.prefill_s)
        return HandedOver(plan, params, usage=hand.usage)

    # Decode

    def _again(self, turn: Turn, handed: HandedOver, failure: Failure, *, last: bool) -> bool:
        """Notes a failed decode leg. Tells whether the turn may be repeated, cold; the ``last`` asks for nothing.

        It may on another node, after a mere broken connection, when what was held or handed off may be why: then with
        another prefill node's hand-off, or none.
        """
        node, prefill = handed.plan.decode.node, handed.plan.prefill.node if handed.plan.prefill else None
        if failure is Failure.SOURCE_GONE and prefill is not None:
            turn.tried.add(prefill.node_id)
            return True
        self._note(turn, node, failure)
        if handed.plan.route is Route.APPEND:
            return True
        if failure in NOT_READ and handed.params is not None and prefill is not None:
            turn.unread.append((node, prefill))
            turn.tried.add(prefill.node_id)
            return True
        if last:
            return False
        if failure is Failure.DISCONNECTED or self._others(turn, Role.DECODE):
            return handed.plan.route is Route.WARM or self._retries.allowed()
        return False

    def _went_well(self, turn: Turn, handed: HandedOver) -> None:
        """A request that works in the end is not to blame for what failed before: the pairs are."""
        plan = handed.plan
        self._live.breakers.answered(plan.decode.node)
        if handed.params is not None and plan.prefill is not None:
            self._live.pairs.read_worked(plan.decode.node, plan.prefill.node)
        for reader, source in turn.unread:
            if apart_s := self._live.pairs.read_failed(reader, source):
                self._observer.set_apart(turn.trace, reader, source, apart_s)
        turn.unread.clear()

    # Ways

    def _next(self, turn: Turn) -> Plan:
        """Returns the way to go now. Raises ApiError when there is none: 429 for busy engines, 503 for no engines."""
        plan = turn.plan
        if plan is None:
            demand = turn.demand_now
            plan = self._planner.alone(demand) if turn.alone else self._planner.cold(demand).chosen
        if plan is None:
            raise self._nobody(turn)
        self._pick(turn, plan)
        return plan

    def _pick(self, turn: Turn, plan: Plan) -> None:
        turn.plan = plan
        turn.outcome.estimate_s = turn.trace.elapsed_s + plan.estimate.ttft_s
        turn.outcome.repeated = bool(turn.tried)
        for target in filter(None, (plan.prefill, plan.decode)):
            self._live.picked(target)

    def _nobody(self, turn: Turn) -> ApiError:
        if self._planner.busy(turn.demand_now, alone=turn.alone):
            message = "all engines that could serve this turn have too much to do; try again in a moment"
            return ApiError(429, message, code="engines_busy", headers={"retry-after": "1"})
        decodes = [node for node in self._table.ready(Role.DECODE, turn.body.model) if turn.demand.admits(node)]
        role = "prefill" if decodes and not turn.alone else "decode"
        return ApiError(503, f"no {role} node is ready", headers={"retry-after": "1"})

    def _to_decode(self, turn: Turn, plan: Plan) -> HandedOver:
        """The decode engine computes the prompt, or what is new in it."""
        if plan.fallback:
            turn.outcome.cold(turn.outcome.miss or misses.NO_PREFILL)
            turn.outcome.fallback = True
        return HandedOver(plan, alone_s=plan.estimate.prefill_s)

    def _decode_only(self, turn: Turn) -> Plan:
        """Returns a decode engine that computes the prompt. Raises ApiError (429, 503)."""
        plan = self._planner.alone(turn.demand_now)
        if plan is None:
            raise self._nobody(turn)
        plan = replace(plan, fallback=True)
        self._pick(turn, plan)
        return plan

    def _unreadable(self, turn: Turn, prefill: Node) -> bool:
        """Tells whether decode could not read this node's blocks, and may compute the prompt in place of it."""
        unread = any(source.node_id == prefill.node_id for _, source in turn.unread)
        return unread and self._policy.prefill_fallback == "decode"

    def _others(self, turn: Turn, role: Role) -> bool:
        """Tells whether a role has ready nodes besides those that failed this turn."""
        able = [node for node in self._table.ready(role, turn.body.model) if node.node_id not in turn.tried]
        return any(role is Role.PREFILL or turn.demand.admits(node) for node in able)

    def _note(self, turn: Turn, node: Node, failure: Failure) -> None:
        turn.tried.add(node.node_id)
        with turn.trace.current():
            self._live.breakers.failed(node, failure)

    def _go_cold(self, turn: Turn, miss: str) -> None:
        self._legs.clean_up(turn)
        turn.warm = turn.plan = None
        turn.outcome.cold(miss)
