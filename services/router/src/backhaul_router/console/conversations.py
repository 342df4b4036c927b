"""What is known of one conversation: its turns on this router, and the block sets that its next turn can find."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from backhaul_common.errors import BackhaulError
from backhaul_router.core.candidates import Pointer, distinct
from backhaul_router.core.claims import HeldSet
from backhaul_router.core.console.journal import Entry, Journal
from backhaul_router.core.console.views import turn_view
from backhaul_router.core.errors import ApiError, invalid
from backhaul_router.core.lookup import MAX_KEYS, checked_session_id, session_key
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.scopes import Scopes

_CALL_S = 2.0
_MAX_SCOPES = 32
"""Scopes that are looked in for one question."""
_MAX_TURNS = 200
"""Turns in an answer; the newest."""

Document = dict[str, Any]


class Registry(Protocol):
    """Where pointers are found."""

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
        """Raises BackhaulError."""
        ...


class Owner(Protocol):
    """Who holds block sets."""

    async def list_sets(self, address: str, set_ids: Collection[str], *, timeout_s: float) -> list[HeldSet]:
        """Returns those of the sets that an agent holds. Raises BackhaulError."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """Which conversation is meant."""

    session_id: str
    model: str = ""
    """Empty: every model that is served."""
    tenant: str = ""
    """Empty where there are none; else only turns that this router remembers say where to look."""
    cache_salt: str = ""


class ConversationReader:
    """Answers one question after the other. It reads, and changes nothing."""

    def __init__(
        self, *, registry: Registry, owner: Owner, table: NodeTable, journal: Journal, scopes: Scopes, tenants: bool
    ) -> None:
        """``tenants``: whether there are any."""
        self._registry = registry
        self._owner = owner
        self._table = table
        self._journal = journal
        self._scopes = scopes
        self._tenants = tenants

    async def by_id(self, question: Question) -> Document:
        """Returns the conversation of a session id. Raises ApiError (400) for an id that cannot be one."""
        session_id = checked_session_id(question.session_id)
        if session_id is None:
            raise invalid("the id of a conversation is needed", param="id")
        key = session_key(session_id)
        turns = [entry for entry in self._journal.under(key) if question.tenant in ("", entry.tenant)]
        scopes = {entry.scope: None for entry in reversed(turns)} | dict.fromkeys(self._named(question))
        return await self._document(turns, [(scope, (key,)) for scope in [*scopes][:_MAX_SCOPES]])

    async def of_turn(self, number: int) -> Document:
        """Returns the conversation of a turn that is remembered. Raises ApiError (404)."""
        turn = self._journal.find(number)
        if turn is None:
            raise ApiError(404, "this router does not remember that turn: see --listen-console in docs/console.md")
        turns = self._journal.conversation(turn)
        named = dict.fromkeys(key for entry in reversed(turns) for key in (*entry.labels, *entry.own))
        keys = tuple(named)[:MAX_KEYS]
        return await self._document(turns, [(turn.scope, keys)] if keys else [])

    def _named(self, question: Question) -> Iterable[str]:
        if self._tenants and not question.tenant:
            return ()
        models = [question.model] if question.model else sorted({name for node in self._table for name in node.models})
        return [self._scopes.scope(question.tenant, model=name, client_salt=question.cache_salt) for name in models]

    async def _document(self, turns: Sequence[Entry], places: Sequence[tuple[str, Sequence[str]]]) -> Document:
        problems: list[str] = []
        found = await asyncio.gather(*(self._find(scope, keys, problems) for scope, keys in places))
        pointers = distinct(pointer for pointers in found for pointer in pointers)
        held, silent = await self._held(pointers, problems)
        return {
            "turns": [turn_view(entry, tenants=self._tenants) for entry in turns[-_MAX_TURNS:]],
            "sets": [
                _set_view(pointer, held.get((pointer.engine_id, pointer.set_id)), known=pointer.node_id not in silent)
                for pointer in pointers
            ],
            "problems": sorted(set(problems)),
        }

    async def _find(self, scope: str, keys: Sequence[str], problems: list[str]) -> list[Pointer]:
        try:
            return await self._registry.find(scope, keys, timeout_s=_CALL_S)
        except BackhaulError:
            problems.append("the registry does not answer: what is retained cannot be told")
            return []

    async def _held(
        self, pointers: Sequence[Pointer], problems: list[str]
    ) -> tuple[dict[tuple[str, str], HeldSet], set[str]]:
        """Returns what owners say of the sets, and the nodes whose owners say nothing."""
        by_node: dict[str, set[str]] = {}
        for pointer in pointers:
            if not pointer.cached:
                by_node.setdefault(pointer.node_id, set()).add(pointer.set_id)
        lists = await asyncio.gather(*(self._ask(node_id, ids, problems) for node_id, ids in by_node.items()))
        silent = {node_id for node_id, held in zip(by_node, lists, strict=True) if held is None}
        return {(one.engine_id, one.set_id): one for held in lists for one in held or ()}, silent

    async def _ask(self, node_id: str, set_ids: set[str], problems: list[str]) -> list[HeldSet] | None:
        node = self._table.get(node_id)
        if node is None:
            problems.append(f"{node_id} is not listed: a pointer outlived it")
            return None
        try:
            return await self._owner.list_sets(node.agent_address, set_ids, timeout_s=_CALL_S)
        except BackhaulError:
            problems.append(f"the agent of {node_id} does not answer: the states of its block sets cannot be told")
            return None


def _set_view(pointer: Pointer, held: HeldSet | None, *, known: bool) -> Document:
    state = "cached" if pointer.cached else held.state if held else "gone" if known else "unknown"
    return {
        "id": pointer.set_id,
        "node": pointer.node_id,
        "engine": pointer.engine_id,
        "state": state,
        "tokens": held.token_count if held else pointer.token_count,
        "blocks": held.block_count if held else None,
        "remaining_s": round(held.remaining_s, 1) if held else None,
    }
