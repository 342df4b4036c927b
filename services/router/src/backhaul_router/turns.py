"""Runs turns: look up, claim, both legs, the answer."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from backhaul_router.answers import Labelled, answer_to
from backhaul_router.attempts import Attempts
from backhaul_router.choosing import Chooser
from backhaul_router.core import responses
from backhaul_router.core.body import TurnBody, parse_body
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.engines import EngineError, Failure
from backhaul_router.core.errors import ApiError, bounded
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.kinds import decode_alone
from backhaul_router.core.legs import prompt_tokens_in
from backhaul_router.core.lookup import TurnKeys, checked_session_id, keys_of
from backhaul_router.core.media import check_media
from backhaul_router.core.nodes import Node, NodeTable, Role
from backhaul_router.core.response_ids import keeper_of
from backhaul_router.core.routing.demand import Demand
from backhaul_router.core.routing.live import Live
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Callers
from backhaul_router.core.turn import Outcome
from backhaul_router.explaining import HEADER, TurnExplanation, explanation_in_header
from backhaul_router.forwarding import Forwarded
from backhaul_router.legs import Legs
from backhaul_router.noting import noted
from backhaul_router.observing import TurnObserver
from backhaul_router.ports import Answer, Policy, TurnRequest
from backhaul_router.running_turn import Turn
from backhaul_router.turn_spans import TurnTrace

_LONGEST_NAME = 200
"""Characters of a model's name that are repeated to whoever asks for it."""

_NO_KEYS = TurnKeys((), (), continues=False)


class Turns:
    """Runs turns over the nodes of one table."""

    def __init__(
        self,
        *,
        chooser: Chooser,
        attempts: Attempts,
        legs: Legs,
        table: NodeTable,
        live: Live,
        fresh: FreshKeys,
        tenants: Callers,
        scopes: Scopes,
        policy: Policy,
        observer: TurnObserver,
        journal: Journal,
    ) -> None:
        self._journal = journal
        self._chooser = chooser
        self._attempts = attempts
        self._legs = legs
        self._table = table
        self._live = live
        self._fresh = fresh
        self._tenants = tenants
        self._scopes = scopes
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
        """Runs one turn; entered when something of the answer is there.

        Leaving early, by cancellation or error, ends both legs, returns a claim that was not used, and has a hand-off
        freed that nobody will read. Raises ApiError while entering.
        """
        with self._begun(request) as turn, noted(self._journal, turn):
            outcome, trace = turn.outcome, turn.trace
            async with AsyncExitStack() as stack:
                await self._chooser.choose(turn, reuse=request.reuse)
                delivery = await self._attempts.deliver(turn, stack)
                if delivery.body is None:
                    outcome.ttft_s = trace.elapsed_s
                else:
                    outcome.answer_s = trace.elapsed_s
                answer = answer_to(turn.body, outcome, delivery.stream, delivery.body, delivery.usage)
                if turn.explanation is not None:
                    answer.headers[HEADER] = explanation_in_header(turn.explanation)
                retained = turn.labelled and answer.status == 200
                stream, own = answer.stream or delivery.stream, turn.own_keys if retained else ()
                with Labelled(self._fresh, turn.scope, own, outcome, stream):
                    try:
                        yield answer
                    except EngineError as error:
                        with trace.current():
                            self._live.breakers.failed(delivery.target.node, error.failure)
                        raise
                if outcome.result == "broken":
                    delivery.span.failed(Failure.DISCONNECTED.value)
                    with trace.current():
                        self._live.breakers.failed(delivery.target.node, Failure.DISCONNECTED)

    @asynccontextmanager
    async def forward(self, request: TurnRequest) -> AsyncIterator[Forwarded]:
        """Runs one turn but for its decode leg, which the caller has somebody send; entered when that can be done.

        The decode leg counts as running until this is left. Leaving early, by cancellation or error, does what it does
        for `run`. Raises ApiError while entering.
        """
        with self._begun(request) as turn, noted(self._journal, turn):
            await self._chooser.choose(turn, reuse=request.reuse)
            handed = await self._attempts.prepare(turn)
            with self._legs.elsewhere(turn, handed) as leg:
                yield Forwarded(turn, handed, leg, legs=self._legs, attempts=self._attempts, fresh=self._fresh)

    async def explain(self, request: TurnRequest) -> TurnExplanation:
        """Returns how a turn would be served now. Raises ApiError."""
        if not self._policy.explain:
            raise ApiError(412, "this router does not explain: it runs without --explain", code="explain_off")
        body = self._body(request)
        with self._observer.question(request.parent) as trace:
            turn = self._begin(request, body, Outcome(), trace)
            return await self._chooser.explain(turn, reuse=request.reuse)

    def _body(self, request: TurnRequest) -> TurnBody:
        """Returns a request's body. Raises ApiError (400, 404)."""
        body = parse_body(request.endpoint, request.body)
        self._check_model(body.model)
        if self._tenants.configured:
            check_media(body.fields)
        return body

    def _check_model(self, model: str) -> None:
        if len(self._table) and not self._table.serves(model):
            name = bounded(model, _LONGEST_NAME)
            raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")

    def _keeper(self, body: TurnBody, tenant: str) -> Node | None:
        """Returns who keeps the response that a turn goes on from, and so must answer; None when it names none.

        Raises ApiError: 404 when nobody does, 503 when it cannot be asked now.
        """
        if not body.previous_response_id:
            return None
        node = keeper_of(body.previous_response_id, tenant, self._table)
        if node is None:
            raise responses.not_kept()
        if node not in self._table.ready(Role.DECODE, body.model):
            message = "the engine that keeps the earlier response takes no turns of this model now"
            raise ApiError(503, message, headers={"retry-after": "1"})
        return node

    @contextmanager
    def _begun(self, request: TurnRequest) -> Iterator[Turn]:
        # It may have waited, or sent its body slowly.
        self._tenants.check(request.tenant)
        body = self._body(request)
        outcome = Outcome()
        with self._observer.turn(body, outcome, request.parent) as trace:
            turn = self._begin(request, body, outcome, trace)
            try:
                yield turn
            finally:
                with trace.current():
                    self._legs.clean_up(turn)

    def _begin(self, request: TurnRequest, body: TurnBody, outcome: Outcome, trace: TurnTrace) -> Turn:
        tenant = request.tenant
        impossible = bool(decode_alone(body, self._policy.keep_constraints))
        session_id = checked_session_id(request.session_id)
        keeper = self._keeper(body, tenant)
        return Turn(
            body=body,
            alone=impossible or keeper is not None,
            scope=self._scopes.scope(tenant, model=body.model, client_salt=body.cache_salt),
            cache_salt=self._scopes.salt(tenant, body.cache_salt),
            keys=keys_of(body, session_id) if request.reuse and not impossible else _NO_KEYS,
            tenant=tenant,
            engine_headers=self.engine_headers(request.authorization),
            outcome=outcome,
            trace=trace,
            demand=Demand(body.model, 0, endpoints=_admitted(request.endpoints, keeper)),
            given_tokens=len(prompt_tokens_in(body) or ()),
            explanation=TurnExplanation() if request.explain and self._policy.explain else None,
        )


def _admitted(endpoints: frozenset[str] | None, keeper: Node | None) -> frozenset[str] | None:
    """Returns host:port of those that may answer; None: all."""
    if keeper is None:
        return endpoints
    only = frozenset({keeper.endpoint})
    return only if endpoints is None else only & endpoints
