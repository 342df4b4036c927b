"""Runs the two legs of a turn, and both again when that may help."""

import uuid
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext

from backhaul_router.answers import whole_of
from backhaul_router.core import misses
from backhaul_router.core.body import Endpoint
from backhaul_router.core.claims import Grant, KeptBlocks
from backhaul_router.core.engines import NOT_READ, RETRYABLE, EngineError, Failure, failure_in
from backhaul_router.core.errors import ApiError, engine_answer
from backhaul_router.core.legs import HandOff, decode_body, hand_off, is_object, prefill_body, token_prefill_body
from backhaul_router.core.nodes import Node, NodeTable, Role
from backhaul_router.core.opening import failed_whole
from backhaul_router.core.picking import Load, Pair, others, pick_decode, pick_pair
from backhaul_router.departures import Departures
from backhaul_router.lookups import Owner
from backhaul_router.observing import TurnObserver
from backhaul_router.ports import Engines, Policy
from backhaul_router.running_turn import Delivery, HandedOver, Turn


class Attempts:
    """Runs legs over the nodes of one table."""

    def __init__(
        self,
        *,
        engines: Engines,
        owner: Owner,
        table: NodeTable,
        load: Load,
        departures: Departures,
        policy: Policy,
        observer: TurnObserver,
    ) -> None:
        self._engines = engines
        self._owner = owner
        self._table = table
        self._load = load
        self._departures = departures
        self._policy = policy
        self._observer = observer

    async def deliver(self, turn: Turn, stack: AsyncExitStack) -> Delivery:
        """Runs both legs; when decode fails before anything of its answer is there, both again, cold, once.

        The decode leg lasts until ``stack`` is left. Raises ApiError.
        """
        for last in (False, True):
            handed = await self._hand_over(turn)
            async with AsyncExitStack() as attempt:
                try:
                    delivery = await self._decode_leg(turn, handed, attempt)
                except EngineError as error:
                    if not self._again(turn, handed, error.failure) or last:
                        raise error.as_api_error("decode") from error
                else:
                    failure = failure_in(delivery.stream.status)
                    if failure is None:
                        self._went_well(turn, handed)
                    if failure is None or not self._again(turn, handed, failure) or last:
                        stack.push_async_exit(attempt.pop_all())
                        return delivery
            self._go_cold(turn, misses.DECODE_FAILED)
        raise AssertionError("unreachable")

    def clean_up(self, turn: Turn) -> None:
        """Returns a claim whose handle no engine has been sent; has a hand-off freed that none will read."""
        if turn.unused is not None:
            self._owner.give_back(turn.unused.source)
            turn.unused = None
        if turn.untold is not None:
            self._release(*turn.untold)
            turn.untold = None

    def _release(self, node: Node, hand: HandOff) -> None:
        if hand.name is not None:
            self._owner.release(KeptBlocks(node.agent_address, *hand.name))

    # Prefill

    async def _hand_over(self, turn: Turn) -> HandedOver:
        """Runs the prefill leg, again if that may help."""
        if turn.alone:
            return HandedOver(self._decode_only(turn))
        for last in (False, True):
            pair = self._pair(turn)
            if pair is None or pair.prefill is None or self._unreadable(turn, pair.prefill):
                return HandedOver(self._without_prefill(turn))
            try:
                hand = await self._prefill_leg(turn, pair.prefill)
            except EngineError as error:
                again = self._repeat_prefill(turn, pair.prefill, error.failure)
                self._go_cold(turn, misses.PREFILL_FAILED if turn.warm else turn.outcome.miss)
                if not last and again:
                    continue
                if error.failure in RETRYABLE and self._policy.prefill_fallback == "decode":
                    return HandedOver(self._without_prefill(turn))
                raise error.as_api_error("prefill") from error
            return self._accept(turn, pair, hand)
        raise AssertionError("unreachable")

    async def _prefill_leg(self, turn: Turn, node: Node) -> HandOff:
        """Runs one prefill leg. Raises EngineError, or ApiError when the engine blames the client."""
        path, body = self._prefill_request(turn)
        with turn.trace.leg("prefill", node, turn.outcome) as headers, self._load.running(node):
            grant = turn.unused

            def sent() -> None:
                # From the first byte on the handle may be spent.
                turn.unused = None

            async with self._departures.waiting_at(node):
                reply = await self._engines.prefill(
                    f"{node.engine_url}{path}",
                    body,
                    self._headers(turn, headers),
                    warm=turn.warm is not None,
                    again=bool(turn.tried),
                    on_sent=sent,
                    late=lambda reply: self._too_late(node, grant, hand_off(reply.body)),
                )
            hand = hand_off(reply.body)
            failure = reply.failure or (Failure.ABANDONED if hand.failed else None)
            if failure:
                raise EngineError(failure)
            self._load.standing.answered(node)
            if reply.status >= 400 and turn.warm and turn.warm.token_ids is not None:
                # Blames a request that is not the client's.
                raise EngineError(Failure.FAULT)
            if reply.status >= 400:
                raise engine_answer(reply.status, reply.body, reply.headers)
            return hand

    def _prefill_request(self, turn: Turn) -> tuple[str, bytes]:
        """Returns path and body of a prefill leg."""
        warm, salt = turn.warm, turn.cache_salt
        if warm and warm.token_ids is not None:
            body = token_prefill_body(turn.body, warm.token_ids, handle=warm.grant.handle, cache_salt=salt)
            return Endpoint.COMPLETIONS.value, body
        handle = warm.grant.handle if warm else None
        constraints = self._policy.keep_constraints
        return turn.path, prefill_body(turn.body, handle=handle, cache_salt=salt, keep_constraints=constraints)

    def _too_late(self, node: Node, grant: Grant | None, hand: HandOff) -> None:
        """Takes a reply that nobody waits for any more: nothing may be kept for it."""
        self._release(node, hand)
        if grant is not None and hand.verdict is not None and not hand.verdict.spent:
            self._owner.give_back(grant.source)

    def _repeat_prefill(self, turn: Turn, node: Node, failure: Failure) -> bool:
        """Notes a failed prefill leg. Tells whether it may be repeated, cold."""
        self._note(turn, node, failure)
        if turn.warm:
            if failure in NOT_READ or failure is Failure.TIMEOUT:
                turn.unread.append((node, turn.warm.holder))
            return True
        elsewhere = others(self._table, Role.PREFILL, turn.body.model, turn.tried)
        return failure is Failure.DISCONNECTED or (failure in RETRYABLE and elsewhere)

    def _accept(self, turn: Turn, pair: Pair, hand: HandOff) -> HandedOver:
        """Takes the prefill engine's answer."""
        params, verdict = hand.params, hand.verdict
        turn.prefilled_s = turn.trace.elapsed_s
        turn.outcome.fallback = False
        if pair.prefill is not None:
            turn.untold = pair.prefill, hand
        if turn.warm and turn.warm.token_ids is not None and verdict is None:
            turn.outcome.count_read(turn.warm.grant.token_count)
        elif turn.warm and verdict is None:
            # Nobody says that the blocks were verified: nothing computed from them may go on.
            turn.outcome.cold(misses.NO_CONNECTOR)
            params = None
        elif turn.warm and verdict is not None:
            if not verdict.spent:
                self._owner.give_back(turn.warm.grant.source)
            if verdict.refused:
                turn.outcome.cold(misses.handle_refused(verdict.refused))
            elif not verdict.read:
                turn.outcome.cold(misses.NOT_NEEDED)
            else:
                self._load.standing.read_worked(turn.warm.prefill, turn.warm.holder)
        turn.outcome.prompt_token_count = hand.usage.token_count if hand.usage else 0
        if verdict is not None:
            turn.outcome.count(verdict)
        if params is None:
            self._observer.missing_hand_off()
            return HandedOver(pair)
        return HandedOver(pair, params, hand.usage)

    # Decode

    async def _decode_leg(self, turn: Turn, handed: HandedOver, stack: AsyncExitStack) -> Delivery:
        """Runs one decode leg until something of the answer is there. Raises EngineError."""
        node, params = handed.pair.decode, handed.params
        body = decode_body(
            turn.body,
            params=params,
            scope=turn.scope,
            keys=turn.keys.label,
            continues=turn.keys.find,
            cache_salt=turn.cache_salt,
            labelled=node.labelled,
        )
        turn.outcome.handed_off = params is not None
        headers = stack.enter_context(turn.trace.leg("decode", node, turn.outcome))
        stack.enter_context(self._load.running(node))
        async with self._departures.waiting_at(node), self._source_there(handed):
            stream = await stack.enter_async_context(
                self._engines.decode(
                    f"{node.engine_url}{turn.path}",
                    body,
                    self._headers(turn, headers),
                    again=bool(turn.tried),
                    on_sent=lambda: self._sent(turn),
                )
            )
            whole = await whole_of(stream)
        if stream.status < 300 and whole is not None:
            if not is_object(whole):
                raise EngineError(Failure.FAULT)
            if failed_whole(whole):
                raise EngineError(Failure.ABANDONED)
        return Delivery(node, stream, whole, handed.usage)

    def _source_there(self, handed: HandedOver) -> AbstractAsyncContextManager[None]:
        """While a decode engine may be reading: one that reads from a node that froze waits for it without end."""
        if handed.params is None or handed.pair.prefill is None:
            return nullcontext()
        return self._departures.waiting_at(handed.pair.prefill, Failure.SOURCE_GONE)

    def _sent(self, turn: Turn) -> None:
        if turn.outcome.handed_off:
            # From now on the decode engine frees the blocks: it may be reading them.
            turn.untold = None
            self._observer.handed_off(turn.trace.elapsed_s - turn.prefilled_s)

    def _again(self, turn: Turn, handed: HandedOver, failure: Failure) -> bool:
        """Notes a failed decode leg. Tells whether both legs may be repeated.

        They may on another node, after a mere broken connection, and when the hand-off may be why: then with another
        prefill node's, or none.
        """
        node, prefill = handed.pair.decode, handed.pair.prefill
        if failure is Failure.SOURCE_GONE and prefill is not None:
            turn.tried.add(prefill.node_id)
            return True
        self._note(turn, node, failure)
        unread = failure in NOT_READ and handed.params is not None and prefill is not None
        if unread and prefill is not None:
            turn.unread.append((node, prefill))
            turn.tried.add(prefill.node_id)
        elsewhere = others(self._table, Role.DECODE, turn.body.model, turn.tried)
        return failure is Failure.DISCONNECTED or unread or elsewhere

    def _went_well(self, turn: Turn, handed: HandedOver) -> None:
        """A request that works in the end is not to blame for what failed before: the pairs are."""
        standing = self._load.standing
        standing.answered(handed.pair.decode)
        if handed.params is not None and handed.pair.prefill is not None:
            standing.read_worked(handed.pair.decode, handed.pair.prefill)
        for reader, source in turn.unread:
            self._observer.set_apart(turn.trace, reader, source, standing.read_failed(reader, source))
        turn.unread.clear()

    # Both

    def _headers(self, turn: Turn, trace_headers: Mapping[str, str]) -> dict[str, str]:
        # An engine's request id is new for each leg and attempt: vLLM mixes up requests with equal ones.
        return {**turn.engine_headers, **trace_headers, "x-request-id": uuid.uuid4().hex}

    def _pair(self, turn: Turn) -> Pair | None:
        if turn.warm:
            return Pair(turn.warm.prefill, turn.warm.holder)
        return pick_pair(self._table, self._load, turn.body.model, without=turn.tried)

    def _unreadable(self, turn: Turn, prefill: Node) -> bool:
        """Tells whether decode could not read this node's blocks, and may compute the prompt in place of it."""
        unread = any(source.node_id == prefill.node_id for _, source in turn.unread)
        return unread and self._policy.prefill_fallback == "decode"

    def _without_prefill(self, turn: Turn) -> Pair:
        if self._policy.prefill_fallback == "strict":
            raise ApiError(503, "no prefill node is ready", headers={"retry-after": "1"})
        pair = self._decode_only(turn)
        turn.outcome.cold(turn.outcome.miss or misses.NO_PREFILL)
        turn.outcome.fallback = True
        return pair

    def _decode_only(self, turn: Turn) -> Pair:
        node = pick_decode(self._table, self._load, turn.body.model, without=turn.tried)
        if node is None:
            raise ApiError(503, "no decode node is ready", headers={"retry-after": "1"})
        return Pair(None, node)

    def _note(self, turn: Turn, node: Node, failure: Failure) -> None:
        turn.tried.add(node.node_id)
        self._load.standing.failed(node, failure)

    def _go_cold(self, turn: Turn, miss: str) -> None:
        self.clean_up(turn)
        turn.warm = None
        turn.outcome.cold(miss)
