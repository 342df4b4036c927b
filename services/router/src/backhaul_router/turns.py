"""Runs turns: look up, claim, prefill leg, decode leg, and what to do when one of them fails."""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from backhaul_router.answers import Labelled, answer_to
from backhaul_router.core import misses
from backhaul_router.core.body import TurnBody, parse_body
from backhaul_router.core.claims import Grant
from backhaul_router.core.engines import RETRYABLE, EngineError, Failure
from backhaul_router.core.errors import ApiError, engine_answer
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.kinds import decode_alone
from backhaul_router.core.legs import HandOff, Params, decode_body, hand_off, prefill_body
from backhaul_router.core.lookup import TurnKeys, checked_session_id, keys_of, scope_of
from backhaul_router.core.nodes import Node, NodeTable
from backhaul_router.core.picking import Load, Pair, pick_decode, pick_pair
from backhaul_router.core.salt import salt_for
from backhaul_router.core.tenants import Tenants
from backhaul_router.core.turn import Outcome
from backhaul_router.lookups import Lookups, Owner, Warm
from backhaul_router.observing import TurnObserver, TurnTrace
from backhaul_router.ports import Answer, Engines, Policy, Stream, TurnRequest

_NO_KEYS = TurnKeys((), (), continues=False)


@dataclass(slots=True)
class _Turn:
    """One turn while it runs."""

    body: TurnBody
    alone: bool
    scope: str
    cache_salt: str
    keys: TurnKeys
    engine_headers: dict[str, str]
    outcome: Outcome
    trace: TurnTrace
    warm: Warm | None = None
    unused: Grant | None = None
    """A grant whose handle no engine has been sent yet."""
    prefilled_s: float = 0.0
    """When the prefill engine answered, seconds after the turn began."""
    tried: set[str] = field(default_factory=set)
    """Nodes that failed this turn."""

    @property
    def path(self) -> str:
        return self.body.endpoint.value


class Turns:
    """Runs turns over the nodes of one table."""

    def __init__(
        self,
        *,
        engines: Engines,
        owner: Owner,
        lookups: Lookups,
        table: NodeTable,
        load: Load,
        fresh: FreshKeys,
        tenants: Tenants,
        policy: Policy,
        observer: TurnObserver,
    ) -> None:
        self._engines = engines
        self._owner = owner
        self._lookups = lookups
        self._table = table
        self._load = load
        self._fresh = fresh
        self._tenants = tenants
        self._policy = policy
        self._observer = observer

    def authenticate(self, authorization: str | None) -> str:
        """Returns the caller's tenant. Raises ApiError (401)."""
        return self._tenants.authenticate(authorization)

    def engine_headers(self, authorization: str | None) -> dict[str, str]:
        """Returns the credentials for engines: the configured key; without one, the client's own unless it is ours."""
        if self._policy.engine_key:
            return {"authorization": f"Bearer {self._policy.engine_key}"}
        return {"authorization": authorization} if authorization and not self._tenants.configured else {}

    @asynccontextmanager
    async def run(self, request: TurnRequest) -> AsyncIterator[Answer]:
        """Runs one turn; entered when the first piece of the answer is there.

        Leaving early, by cancellation or error, ends both legs and returns a claim that was not used. Raises ApiError
        while entering.
        """
        tenant = self.authenticate(request.authorization)
        body = parse_body(request.endpoint, request.body)
        self._check_model(body.model)
        outcome = Outcome()
        with self._observer.turn(request.endpoint, body.model, outcome, request.parent) as trace:
            turn = self._begin(request, body, tenant, outcome, trace)
            try:
                async with AsyncExitStack() as stack:
                    await self._look_up(turn, request.reuse)
                    stream, decode = await self._legs(turn, stack)
                    outcome.ttft_s = trace.elapsed_s
                    if outcome.handed_off:
                        self._observer.handed_off(outcome.ttft_s - turn.prefilled_s)
                    answer = await answer_to(outcome, stream)
                    retained = outcome.handed_off and decode.reuse and stream.status == 200
                    with Labelled(self._fresh, turn.scope, turn.keys.own if retained else "", outcome, stream):
                        yield answer
            finally:
                self._return_unused(turn)

    def _check_model(self, model: str) -> None:
        if len(self._table) and not self._table.serves(model):
            raise ApiError(404, f"the model {model!r} does not exist", code="model_not_found", param="model")

    def _begin(self, request: TurnRequest, body: TurnBody, tenant: str, outcome: Outcome, trace: TurnTrace) -> _Turn:
        salt = body.cache_salt
        if self._tenants.configured:
            salt = salt_for(self._policy.cluster_key, tenant=tenant, client_salt=salt)
        alone = bool(decode_alone(body))
        session_id = checked_session_id(request.session_id)
        return _Turn(
            body=body,
            alone=alone,
            scope=scope_of(model=body.model, cache_salt=salt, tenant=tenant),
            cache_salt=salt,
            keys=keys_of(body, session_id) if request.reuse and not alone else _NO_KEYS,
            engine_headers=self.engine_headers(request.authorization),
            outcome=outcome,
            trace=trace,
        )

    # Lookup

    async def _look_up(self, turn: _Turn, reuse: bool) -> None:
        miss = self._no_lookup(turn, reuse)
        if miss:
            turn.outcome.cold(miss)
            return
        found = await self._lookups.claim_for(
            turn.body, scope=turn.scope, keys=turn.keys, headers=turn.engine_headers, trace=turn.trace
        )
        if isinstance(found, str):
            turn.outcome.cold(found)
        else:
            turn.warm, turn.unused = found, found.grant
            turn.outcome.warm()

    def _no_lookup(self, turn: _Turn, reuse: bool) -> str:
        if turn.alone:
            return misses.UNSUPPORTED_REQUEST
        if not reuse:
            return misses.REUSE_OFF
        if not turn.keys.label:
            return misses.NO_KEYS
        return "" if turn.keys.find else misses.FIRST_TURN

    # Legs

    async def _legs(self, turn: _Turn, stack: AsyncExitStack) -> tuple[Stream, Node]:
        """Runs both legs; when decode fails before its first piece, both again elsewhere, cold, once."""
        for last in (False, True):
            decode, params = await self._hand_over(turn)
            async with AsyncExitStack() as attempt:
                try:
                    stream = await attempt.enter_async_context(self._decode_leg(turn, decode, params))
                except EngineError as error:
                    self._note(turn, decode, error.failure)
                    if last or not self._elsewhere(turn, error.failure):
                        raise error.as_api_error("decode") from error
                else:
                    if stream.status < 500 or last or not self._elsewhere(turn, Failure.FAULT, besides=decode):
                        stack.push_async_exit(attempt.pop_all())
                        return stream, decode
                    self._note(turn, decode, Failure.FAULT)
            self._go_cold(turn, misses.DECODE_FAILED)
        raise AssertionError("unreachable")

    async def _hand_over(self, turn: _Turn) -> tuple[Node, Params | None]:
        """Runs the prefill leg, again if that may help; returns the decode node and what to hand it."""
        if turn.alone:
            return self._decode_only(turn), None
        for last in (False, True):
            pair = self._pair(turn)
            if pair is None or pair.prefill is None:
                return self._without_prefill(turn), None
            try:
                hand = await self._prefill_leg(turn, pair.prefill)
            except EngineError as error:
                self._note(turn, pair.prefill, error.failure)
                again = turn.warm is not None or self._other_prefill(turn, error.failure)
                self._go_cold(turn, misses.PREFILL_FAILED if turn.warm else turn.outcome.miss)
                if not last and again:
                    continue
                if error.failure in RETRYABLE and self._policy.prefill_fallback == "decode":
                    return self._without_prefill(turn), None
                raise error.as_api_error("prefill") from error
            return pair.decode, self._accept(turn, hand)
        raise AssertionError("unreachable")

    async def _prefill_leg(self, turn: _Turn, node: Node) -> HandOff:
        """Runs one prefill leg. Raises EngineError, or ApiError when the engine blames the client."""
        handle = turn.warm.grant.handle if turn.warm else None
        body = prefill_body(
            turn.body,
            handle=handle,
            cache_salt=turn.cache_salt,
            keep_constraints=self._policy.keep_constraints,
        )
        with turn.trace.leg("prefill", node, turn.outcome) as headers, self._load.running(node):
            # From the first byte on the handle may be spent.
            grant, turn.unused = turn.unused, None
            try:
                reply = await self._engines.prefill(
                    f"{node.engine_url}{turn.path}", body, self._headers(turn, headers), warm=handle is not None
                )
            except EngineError as error:
                if error.failure is Failure.REFUSED:
                    turn.unused = grant
                raise
            if reply.failure:
                raise EngineError(reply.failure)
            if reply.status >= 400:
                raise engine_answer(reply.status, reply.body, reply.headers)
            hand = hand_off(reply.body)
            if hand.failed:
                raise EngineError(Failure.FAULT)
            return hand

    def _accept(self, turn: _Turn, hand: HandOff) -> Params | None:
        """Takes the prefill engine's answer; returns the params for the decode leg, None to let it compute alone."""
        params, verdict = hand.params, hand.verdict
        turn.prefilled_s = turn.trace.elapsed_s
        if turn.warm and verdict is None:
            # Nobody says that the blocks were verified: nothing computed from them may go on.
            turn.outcome.cold(misses.NO_CONNECTOR)
            params = None
        elif turn.warm and verdict is not None:
            if not verdict.spent:
                self._owner.give_back(turn.warm.grant.claim)
            if verdict.refused:
                turn.outcome.cold(misses.handle_refused(verdict.refused))
            elif not verdict.read:
                turn.outcome.cold(misses.NOT_NEEDED)
        turn.outcome.prompt_token_count = hand.prompt_token_count
        if verdict is not None:
            turn.outcome.count(verdict)
        if params is None:
            self._observer.missing_hand_off()
        return params

    @asynccontextmanager
    async def _decode_leg(self, turn: _Turn, node: Node, params: Params | None) -> AsyncIterator[Stream]:
        body = decode_body(turn.body, params=params, scope=turn.scope, keys=turn.keys.label, cache_salt=turn.cache_salt)
        turn.outcome.handed_off = params is not None
        url = f"{node.engine_url}{turn.path}"
        with turn.trace.leg("decode", node, turn.outcome) as headers, self._load.running(node):
            async with self._engines.decode(url, body, self._headers(turn, headers)) as stream:
                yield stream

    def _headers(self, turn: _Turn, trace_headers: Mapping[str, str]) -> dict[str, str]:
        # An engine's request id is new for each leg and attempt: vLLM mixes up requests with equal ones.
        return {**turn.engine_headers, **trace_headers, "x-request-id": uuid.uuid4().hex}

    # Nodes

    def _pair(self, turn: _Turn) -> Pair | None:
        if turn.warm:
            return Pair(turn.warm.prefill, turn.warm.holder)
        return pick_pair(self._table, self._load, turn.body.model, without=turn.tried)

    def _without_prefill(self, turn: _Turn) -> Node:
        if self._policy.prefill_fallback == "strict":
            raise ApiError(503, "no prefill node is ready", headers={"retry-after": "1"})
        node = self._decode_only(turn)
        turn.outcome.cold(turn.outcome.miss or misses.NO_PREFILL)
        turn.outcome.fallback = True
        return node

    def _decode_only(self, turn: _Turn) -> Node:
        node = pick_decode(self._table, self._load, turn.body.model, without=turn.tried)
        if node is None:
            raise ApiError(503, "no decode node is ready", headers={"retry-after": "1"})
        return node

    def _elsewhere(self, turn: _Turn, failure: Failure, besides: Node | None = None) -> bool:
        """Tells whether a failed decode leg may be tried again: on another node, or after a mere broken connection."""
        without = turn.tried | ({besides.node_id} if besides else set())
        node = pick_decode(self._table, self._load, turn.body.model, without=without)
        return failure is Failure.DISCONNECTED or (node is not None and node.node_id not in without)

    def _other_prefill(self, turn: _Turn, failure: Failure) -> bool:
        pair = pick_pair(self._table, self._load, turn.body.model, without=turn.tried)
        other = pair is not None and pair.prefill is not None and pair.prefill.node_id not in turn.tried
        return failure is Failure.DISCONNECTED or (failure in RETRYABLE and other)

    def _note(self, turn: _Turn, node: Node, failure: Failure) -> None:
        turn.tried.add(node.node_id)
        if failure in (Failure.REFUSED, Failure.DISCONNECTED):
            self._load.avoid(node)

    def _go_cold(self, turn: _Turn, miss: str) -> None:
        self._return_unused(turn)
        turn.warm = None
        turn.outcome.cold(miss)

    def _return_unused(self, turn: _Turn) -> None:
        if turn.unused is not None:
            self._owner.give_back(turn.unused.claim)
            turn.unused = None
