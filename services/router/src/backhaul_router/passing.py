"""Passes on to one engine what is no turn. Nothing of it is looked up or kept, and the answer says so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from backhaul_common.metering import Counter
from backhaul_router import instruments
from backhaul_router.answers import passed_on, whole_answer
from backhaul_router.core import responses
from backhaul_router.core.engines import EngineError, Reply
from backhaul_router.core.errors import ApiError, bounded
from backhaul_router.core.media import check_media
from backhaul_router.core.nodes import Node, NodeTable
from backhaul_router.core.passing import parse_passed
from backhaul_router.core.response_ids import keeper_of
from backhaul_router.core.routing.demand import Demand
from backhaul_router.core.routing.live import Live
from backhaul_router.core.routing.planner import Planner
from backhaul_router.core.routing.target import Target
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Callers
from backhaul_router.core.turn import REUSE_OFF

_LONGEST_NAME = 200
_RETRY = {"retry-after": "1"}


class Engines(Protocol):
    """The engines' HTTP servers."""

    async def ask(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        """Sent once. Raises EngineError."""
        ...


@dataclass(frozen=True, slots=True)
class PassedAnswer:
    """An engine's whole answer, as the client gets it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Passing:
    """Passes requests on, each once."""

    def __init__(
        self, *, engines: Engines, table: NodeTable, planner: Planner, live: Live, tenants: Callers, scopes: Scopes
    ) -> None:
        self._tenants = tenants
        self._engines = engines
        self._table = table
        self._planner = planner
        self._live = live
        self._scopes = scopes
        self._passed = Counter(instruments.PASSED_ON)

    async def ask(self, path: str, data: bytes, *, tenant: str, headers: Mapping[str, str]) -> PassedAnswer:
        """Passes a request on to an engine that does least. ``headers`` go to it. Raises ApiError."""
        body = parse_passed(path, data)
        if self._tenants.configured:
            check_media(body.fields)
        self._tenants.check(tenant)
        target = self._target(body.model)
        sent = body.for_engine(self._scopes.salt(tenant, body.client_salt))
        self._passed.add(1, path)
        reply = await self._asked("POST", target, path, sent, {**headers, **target.headers})
        if reply.status == 404 and not _explained(reply.body):
            # What FastAPI says of a path that it does not know.
            raise ApiError(404, f"the engines do not serve {path}: their model or vLLM's version does not")
        return _answer(reply)

    async def response(self, response_id: str, *, tenant: str, headers: Mapping[str, str]) -> PassedAnswer:
        """Returns an earlier response from the engine that keeps it. Raises ApiError."""
        self._tenants.check(tenant)
        node = keeper_of(response_id, tenant, self._table)
        if node is None:
            raise responses.not_kept()
        if not node.usable:
            raise ApiError(503, "the engine that keeps the response does not answer now", headers=_RETRY)
        self._passed.add(1, "/v1/responses/{id}")
        # The id is one of ours: nothing in it needs to be quoted.
        reply = await self._asked("GET", Target(node), f"/v1/responses/{response_id}", None, headers)
        if reply.status == 404:
            raise responses.not_kept(at_engine=True)
        return _answer(reply)

    def _target(self, model: str) -> Target:
        if len(self._table) and not self._table.serves(model):
            name = bounded(model, _LONGEST_NAME)
            raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")
        target = self._planner.anyone(Demand(model, 0))
        if target is None:
            raise ApiError(503, "no node is ready", headers=_RETRY)
        return target

    async def _asked(
        self, method: str, target: Target, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Reply:
        node: Node = target.node
        try:
            with self._live.load.running(target):
                reply = await self._engines.ask(method, f"{node.engine_url}{path}", body, headers)
            if reply.failure is not None:
                raise EngineError(reply.failure)
        except EngineError as error:
            self._live.breakers.failed(node, error.failure)
            raise error.as_api_error(node.role.value) from error
        self._live.breakers.answered(node)
        return reply


def _answer(reply: Reply) -> PassedAnswer:
    return PassedAnswer(reply.status, {**passed_on(reply.headers), **REUSE_OFF}, whole_answer(reply.body, None))


def _explained(body: bytes) -> bool:
    """Tells whether an error is an engine's own, in OpenAI's form or Anthropic's."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and isinstance(document.get("error"), dict)
