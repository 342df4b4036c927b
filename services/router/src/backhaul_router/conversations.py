"""Ends and finds conversations: what decode engines retain for their next turn."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from backhaul_common.clock import Clock
from backhaul_common.errors import BackhaulError
from backhaul_router.core.body import Endpoint, parse_body
from backhaul_router.core.candidates import Pointer, distinct
from backhaul_router.core.claims import Released
from backhaul_router.core.errors import ApiError, invalid
from backhaul_router.core.lookup import MAX_KEYS, checked_session_id, keys_of, session_key
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Callers

_log = structlog.get_logger(__name__)

_CALL_S = 5.0
_END_S = 10.0
"""For all calls together."""
_LOOKS = 8
"""Most lookups for one conversation: each finds 16 pointers per key, and an owner's removals take a moment."""
_PAUSE_S = 0.05
"""Between two lookups; the pointers of a turn that has only just ended appear within 20 ms."""
_RETRY = {"retry-after": "1"}
_NO_NIXL = (
    "not all block sets could be released: a node agent runs without NIXL and cannot have its engine free them before "
    "their time is over. Install services/node-agent/requirements-nixl.txt in its environment and start it again"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """Which conversation is over, or looked for."""

    session_id: str | bytes | None = None
    body: bytes = b""
    """JSON body of its last chat turn; names a conversation without an id."""
    model: str = ""
    """Empty: every model that is served. With a body: the body's own."""
    cache_salt: str = ""
    """The client's own. With a body: the body's own."""
    authorization: str | None = None


def deleted_document(conversation_id: str, ended: Released) -> bytes:
    """Returns the HTTP API's JSON of a conversation that was ended."""
    document = {
        "id": conversation_id,
        "object": "conversation.deleted",
        "deleted": True,
        "released": ended.released,
        "deferred": ended.deferred,
    }
    return msgspec.json.encode(document)


class Registry(Protocol):
    """Where pointers are found."""

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
        """Raises BackhaulError."""
        ...


class Owner(Protocol):
    """Who releases block sets."""

    async def release_sets(
        self, address: str, set_ids: Sequence[str], *, timeout_s: float, scope: str = "", keys: Sequence[str] = ()
    ) -> Released:
        """Releases the sets, and those under the keys to which no pointer leads yet. Raises BackhaulError."""
        ...


class Conversations:
    """Ends one conversation after the other."""

    def __init__(
        self, *, registry: Registry, owner: Owner, table: NodeTable, tenants: Callers, scopes: Scopes, clock: Clock
    ) -> None:
        self._registry = registry
        self._owner = owner
        self._table = table
        self._tenants = tenants
        self._scopes = scopes
        self._clock = clock

    async def end(self, ending: Ending) -> Released:
        """Releases what is retained for a conversation of the caller's tenant.

        An unknown conversation looks like one that retains nothing. Raises ApiError: 400 for a bad body or no id, 401,
        503 when no nodes are known, or registry or owner do not answer; asking again goes on with what is left.
        """
        tenant = self._tenants.authenticate(ending.authorization)
        models, salt, keys = self._named(ending)
        scopes = [self._scopes.scope(tenant, model=model, client_salt=salt) for model in models]
        deadline = self._clock.monotonic() + _END_S
        released = _total(await _all(self._end_in(scope, keys, deadline) for scope in scopes))
        _log.info("conversation ended", released=released.released, deferred=released.deferred)
        return released

    async def find(self, ending: Ending) -> list[tuple[str, Pointer]]:
        """Returns what is held for a conversation of the caller's tenant, with the model of each; touches nothing.

        Raises ApiError: 400 for a bad body or no id, 401, 503 when no nodes are known or the registry does not answer.
        """
        tenant = self._tenants.authenticate(ending.authorization)
        models, salt, keys = self._named(ending)
        found: list[tuple[str, Pointer]] = []
        for model in models:
            scope = self._scopes.scope(tenant, model=model, client_salt=salt)
            pointers = await self._find(scope, keys[:MAX_KEYS], _CALL_S)
            found += [(model, pointer) for pointer in distinct(pointers)]
        return found

    def _named(self, ending: Ending) -> tuple[list[str], str, tuple[str, ...]]:
        """Returns models, the client's salt and lookup keys."""
        session_id = checked_session_id(ending.session_id)
        if ending.body:
            body = parse_body(Endpoint.CHAT, ending.body)
            return [body.model], body.cache_salt, keys_of(body, session_id).label
        if session_id is None:
            raise invalid("a session id, or the body of the last turn, is needed", param="session_id")
        models = [ending.model] if ending.model else sorted({name for node in self._table for name in node.models})
        if not models:
            raise ApiError(503, "no nodes are known", headers=_RETRY)
        return models, ending.cache_salt, (session_key(session_id),)

    async def _end_in(self, scope: str, keys: Sequence[str], deadline: float) -> Released:
        """Looks until two lookups in a row show nothing new."""
        keys = keys[:MAX_KEYS]
        known: set[tuple[str, str]] = set()
        total = await self._release_fenced(scope, keys, self._call_s(deadline))
        idle = 0
        for _ in range(_LOOKS):
            pointers = await self._find(scope, keys, self._call_s(deadline))
            new = [pointer for pointer in distinct(pointers) if (pointer.engine_id, pointer.set_id) not in known]
            known |= {(pointer.engine_id, pointer.set_id) for pointer in new}
            total = _total([total, await self._release(new, self._call_s(deadline))])
            idle = 0 if new else idle + 1
            if idle == 2:
                break
            await self._clock.sleep(_PAUSE_S)
        return total

    def _call_s(self, deadline: float) -> float:
        """Returns how long the next call may take. Raises ApiError (503) when there is no time left."""
        left = deadline - self._clock.monotonic()
        if left <= 0:
            raise ApiError(503, "not all block sets could be released in time", headers=_RETRY)
        return min(left, _CALL_S)

    async def _find(self, scope: str, keys: Sequence[str], timeout_s: float) -> list[Pointer]:
        try:
            return await self._registry.find(scope, keys, timeout_s=timeout_s)
        except BackhaulError as error:
            raise ApiError(503, "the registry does not answer", headers=_RETRY) from error

    async def _release(self, pointers: Sequence[Pointer], timeout_s: float) -> Released:
        """Has owners release block sets. A node that is gone has nothing left to release."""
        by_address: dict[str, list[str]] = {}
        for pointer in pointers:
            node = self._table.get(pointer.node_id)
            if node is not None and node.engine(pointer.engine_id) is not None:
                by_address.setdefault(node.agent_address, []).append(pointer.set_id)
        return await _released(
            self._owner.release_sets(address, set_ids, timeout_s=timeout_s) for address, set_ids in by_address.items()
        )

    async def _release_fenced(self, scope: str, keys: Sequence[str], timeout_s: float) -> Released:
        """Has owners that have started anew release what nobody can find until their fence is over."""
        nodes = (node for node in self._table if not node.orphaned and any(engine.fenced for engine in node.engines))
        return await _released(
            self._owner.release_sets(node.agent_address, (), timeout_s=timeout_s, scope=scope, keys=keys)
            for node in nodes
        )


async def _released(calls: Iterable[Awaitable[Released]]) -> Released:
    """Makes all calls at once; returns what they released together. Raises ApiError (503)."""
    try:
        return _total(await _all(calls))
    except BackhaulError as error:
        if error.reason == "NIXL_MISSING":
            raise ApiError(503, _NO_NIXL, code="no_nixl") from error
        raise ApiError(503, "not all block sets could be released", headers=_RETRY) from error


async def _all(calls: Iterable[Awaitable[Released]]) -> list[Released]:
    """Makes all calls at once and waits for each. Then raises the first failure, if there is one."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    failure = next((answer for answer in answers if isinstance(answer, BaseException)), None)
    if failure is not None:
        raise failure
    return [answer for answer in answers if isinstance(answer, Released)]


def _total(parts: Iterable[Released]) -> Released:
    parts = list(parts)
    return Released(sum(one.released for one in parts), sum(one.deferred for one in parts))
