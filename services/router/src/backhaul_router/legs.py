"""Runs single legs, and takes note of what they show."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    contextmanager,
    nullcontext,
)

from backhaul_router.answers import whole_of
from backhaul_router.core.body import Endpoint
from backhaul_router.core.claims import Grant, KeptBlocks
from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.errors import engine_answer
from backhaul_router.core.expectation import Expectation
from backhaul_router.core.legs import HandOff, decode_body, hand_off, is_object, prefill_body, token_prefill_body
from backhaul_router.core.load import Work
from backhaul_router.core.lookup import response_key
from backhaul_router.core.nodes import Node
from backhaul_router.core.opening import failed_whole
from backhaul_router.core.response_ids import response_id_of
from backhaul_router.core.routing.learning import Learning
from backhaul_router.core.routing.live import Live
from backhaul_router.core.routing.target import Target
from backhaul_router.departures import Departures
from backhaul_router.lookups import Owner
from backhaul_router.observing import TurnObserver
from backhaul_router.ports import Engines, Policy
from backhaul_router.running_turn import DecodeLeg, Delivery, HandedOver, Turn

_ID_BYTES = 16
"""Of a name that nothing else has."""


class Legs:
    """Runs legs, each once."""

    def __init__(
        self,
        *,
        engines: Engines,
        owner: Owner,
        live: Live,
        learning: Learning,
        departures: Departures,
        policy: Policy,
        observer: TurnObserver,
    ) -> None:
        self._engines = engines
        self._owner = owner
        self._live = live
        self._learning = learning
        self._departures = departures
        self._policy = policy
        self._observer = observer

    def clean_up(self, turn: Turn) -> None:
        """Returns a claim whose handle no engine has been sent; has a hand-off freed that none will read."""
        with turn.trace.current():
            if turn.unused is not None:
                self._owner.give_back(turn.unused.source)
                turn.unused = None
            if turn.untold is not None:
                self._release(*turn.untold)
                turn.untold = None

    def give_back(self, turn: Turn, grant: Grant) -> None:
        """Gives back what nothing has read."""
        with turn.trace.current():
            self._owner.give_back(grant.source)

    def _release(self, node: Node, hand: HandOff) -> None:
        if hand.name is not None:
            self._owner.release(KeptBlocks(node.agent_address, *hand.name))

    # Prefill

    async def prefill(self, turn: Turn, target: Target, *, expected_s: float) -> HandOff:
        """Runs a prefill leg. Raises EngineError, or ApiError when the engine blames the client."""
        path, body = self._prefill_request(turn)
        node, grant = target.node, turn.unused
        with (
            turn.trace.leg("prefill", target, turn.outcome) as span,
            self._running(target, expected_s) as work,
        ):

            def sent() -> None:
                # From the first byte on the handle may be spent.
                turn.unused = None

            async with self._departures.waiting_at(node):
                reply = await self._engines.prefill(
                    f"{node.engine_url}{path}",
                    body,
                    self._headers(turn, target, span.headers),
                    warm=turn.warm is not None,
                    again=bool(turn.tried),
                    on_sent=sent,
                    late=lambda reply: self._too_late(turn, node, grant, hand_off(reply.body)),
                )
            span.answered(reply.status)
            seconds = work.served()
            hand = hand_off(reply.body)
            failure = reply.failure or (Failure.ABANDONED if hand.failed else None)
            if failure:
                raise EngineError(failure)
            self._live.breakers.answered(node)
            if reply.status >= 400 and turn.warm and turn.warm.token_ids is not None:
                # Blames a request that is not the client's.
                raise EngineError(Failure.FAULT)
            if reply.status >= 400:
                raise engine_answer(reply.status, reply.body, reply.headers)
            self._learn_prefill(turn, target, hand, seconds)
            return hand

    def _learn_prefill(self, turn: Turn, target: Target, hand: HandOff, seconds: float) -> None:
        self._learning.prefilled(
            target,
            turn.demand,
            byte_count=turn.text_byte_count,
            token_count=hand.usage.token_count if hand.usage else 0,
            verdict=hand.verdict,
            seconds=seconds,
        )

    def _prefill_request(self, turn: Turn) -> tuple[str, bytes]:
        """Returns path and body of a prefill leg."""
        warm, salt = turn.warm, turn.cache_salt
        if warm and warm.token_ids is not None:
            body = token_prefill_body(turn.body, warm.token_ids, handle=warm.grant.handle, cache_salt=salt)
            return Endpoint.COMPLETIONS.value, body
        handle = warm.grant.handle if warm else None
        constraints = self._policy.keep_constraints
        return turn.path, prefill_body(turn.body, handle=handle, cache_salt=salt, keep_constraints=constraints)

    def _too_late(self, turn: Turn, node: Node, grant: Grant | None, hand: HandOff) -> None:
        """Takes a reply that nobody waits for any more: nothing may be kept for it."""
        with turn.trace.current():
            self._release(node, hand)
            if grant is not None and hand.verdict is not None and not hand.verdict.spent:
                self._owner.give_back(grant.source)

    # Decode

    async def decode(self, turn: Turn, handed: HandedOver, stack: AsyncExitStack) -> Delivery:
        """Runs a decode leg until something of the answer is there; it lasts until ``stack`` is left.

        Raises EngineError.
        """
        target, node = handed.plan.decode, handed.plan.decode.node
        body = self._decode_request(turn, handed)
        span = stack.enter_context(turn.trace.leg("decode", target, turn.outcome))
        work = stack.enter_context(self._running(target, handed.alone_s))
        began_s = turn.trace.elapsed_s
        async with self._departures.waiting_at(node), self._source_there(handed):
            stream = await stack.enter_async_context(
                self._engines.decode(
                    f"{node.engine_url}{turn.path}",
                    body,
                    self._headers(turn, target, span.headers),
                    again=bool(turn.tried),
                    on_sent=lambda: self._sent(turn),
                )
            )
            span.answered(stream.status)
            first_s = turn.trace.elapsed_s - began_s
            served_s = work.served()
            whole = await whole_of(stream)
        if stream.status < 300 and whole is not None:
            if not is_object(whole):
                raise EngineError(Failure.FAULT)
            if failed_whole(whole):
                raise EngineError(Failure.ABANDONED)
        if stream.status < 300 and whole is None:
            # An answer that is not streamed comes when all of it is there: that says nothing of its beginning.
            self._learn_decode(turn, handed, first_s=first_s, served_s=served_s)
        return Delivery(target, stream, whole, handed.usage, span)

    @contextmanager
    def elsewhere(self, turn: Turn, handed: HandedOver) -> Iterator[DecodeLeg]:
        """Counts a decode leg that somebody else sends, until it is left.

        Nobody tells when its compute is over: it is taken to last as long as it was expected to.
        """
        target = handed.plan.decode
        body = self._decode_request(turn, handed)
        with (
            turn.trace.leg("decode", target, turn.outcome) as span,
            self._running(target, handed.alone_s) as work,
            _served_after(handed.alone_s, work),
        ):
            expectation = self._expectation(turn, handed, work)
            yield DecodeLeg(target, expectation, self._headers(turn, target, span.headers), body, span)

    def taken(self, turn: Turn) -> None:
        """Somebody else has been given a decode leg to send."""
        self._sent(turn)

    def streams_elsewhere(self, turn: Turn, target: Target) -> None:
        """A decode leg that somebody else has sent is answered: its engine has the prompt."""
        self._learning.answered(target, turn.demand)

    def began_elsewhere(self, leg: DecodeLeg, *, first_s: float) -> None:
        """The first byte of a stream that somebody else has sent came ``first_s`` seconds after it was sent."""
        self._learning.told(leg.expectation, seconds=first_s)

    def _expectation(self, turn: Turn, handed: HandedOver, work: Work) -> Expectation:
        target, handed_off, outcome = handed.plan.decode, handed.params is not None, turn.outcome
        return Expectation(
            node_id=target.key[0],
            engine_id=target.key[1],
            endpoint=target.node.endpoint,
            route=outcome.route.value,
            stream=turn.body.stream and turn.body.endpoint is not Endpoint.RESPONSES,
            handed_off=handed_off,
            token_count=self._learning.decoding(target, turn.demand, handed_off=handed_off),
            share=work.share,
            before_s=turn.trace.elapsed_s,
            estimate_s=None if outcome.repeated else outcome.estimate_s,
        )

    def _decode_request(self, turn: Turn, handed: HandedOver) -> bytes:
        """Returns the body of a decode leg."""
        target = handed.plan.decode
        # Without the connector nobody would see to it that blocks are retained and can be found.
        keys = self._named(turn, target)
        turn.labelled = bool(keys) and target.reuse
        turn.outcome.handed_off = handed.params is not None
        turn.outcome.node_id = target.key[0]
        return decode_body(
            turn.body,
            params=handed.params if handed.params is not None or not turn.labelled else {},
            scope=turn.scope,
            keys=keys,
            continues=turn.keys.find,
            traceparent=turn.trace.traceparent,
            cache_salt=turn.cache_salt,
            labelled=target.labelled,
            response_id=turn.response_id,
        )

    def _named(self, turn: Turn, target: Target) -> tuple[str, ...]:
        """Names a response after who gives it; returns the keys by which the next turn finds this one."""
        turn.response_id = turn.response_key = ""
        if turn.body.endpoint is Endpoint.RESPONSES:
            turn.response_id = response_id_of(target.node, turn.tenant, secrets.token_hex(_ID_BYTES))
        if turn.response_id and turn.retains:
            turn.response_key = response_key(turn.response_id)
        return (*turn.keys.label, turn.response_key) if turn.response_key else turn.keys.label

    def _learn_decode(self, turn: Turn, handed: HandedOver, *, first_s: float, served_s: float) -> None:
        if handed.params is not None:
            self._learning.decoded(handed.plan.decode, turn.demand, seconds=first_s)
        else:
            self._learning.appended(handed.plan.decode, turn.demand, seconds=served_s)

    def _source_there(self, handed: HandedOver) -> AbstractAsyncContextManager[None]:
        """While a decode engine may be reading: one that reads from a node that froze waits for it without end."""
        if handed.params is None or handed.plan.prefill is None:
            return nullcontext()
        return self._departures.waiting_at(handed.plan.prefill.node, Failure.SOURCE_GONE)

    def _sent(self, turn: Turn) -> None:
        if turn.outcome.handed_off:
            # From now on the decode engine frees the blocks: it may be reading them.
            turn.untold = None
            self._observer.handed_off(turn.trace.elapsed_s - turn.prefilled_s)

    def _running(self, target: Target, expected_s: float) -> AbstractContextManager[Work]:
        others = self._live.estimator.others_before(target)
        return self._live.load.running(target, expected_s=expected_s, others=others)

    def _headers(self, turn: Turn, target: Target, trace_headers: Mapping[str, str]) -> dict[str, str]:
        # An engine's request id is new for each leg and attempt: vLLM mixes up requests with equal ones.
        return {**turn.engine_headers, **trace_headers, **target.headers, "x-request-id": secrets.token_hex(_ID_BYTES)}


@contextmanager
def _served_after(seconds: float, work: Work) -> Iterator[None]:
    timer = asyncio.get_running_loop().call_later(seconds, work.served)
    try:
        yield
    finally:
        timer.cancel()
