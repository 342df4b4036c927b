"""Finding what is held for a conversation."""

from collections.abc import Sequence
from typing import Any

import pytest

from backhaul.router.v1 import conversation_pb2 as pb
from backhaul_common.clock import SystemClock
from backhaul_common.errors import (
    BackhaulError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from backhaul_router.admission import Admission
from backhaul_router.conversation_service import ConversationService
from backhaul_router.conversations import Conversations
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.lookup import scope_of, session_key
from backhaul_router.core.nodes import NodeTable
from backhaul_router.core.queueing import TurnQueue
from backhaul_router.core.scopes import Scopes
from backhaul_router.core.tenants import Tenants
from tests.unit.router.ports import FakeClock, ready
from tests.unit.router.test_conversations import Nobody


class Index:
    """Holds one set for the conversation ``trip`` with model ``a``, under two keys."""

    def __init__(self) -> None:
        self.failure: BackhaulError | None = None

    async def find(self, scope: str, keys: Sequence[str], *, timeout_s: float) -> list[Pointer]:
        if self.failure is not None:
            raise self.failure
        if scope != scope_of(model="a", cache_salt="", tenant="") or keys[0] != session_key(b"trip"):
            return []
        pointer = Pointer(keys[0], "set-1", "engine-1", "d1", 70, b"", 64, b"")
        return [pointer, pointer]


class Call:
    """What a handler is given of the call."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def find(index: Index, *, explain: bool = True, **wanted: Any) -> list[pb.HeldSet]:
    table, tenants = NodeTable(), Tenants()
    table.change(ready("d1", models=frozenset({"a", "b"})), ())
    clock = FakeClock()
    conversations = Conversations(
        registry=index, owner=Nobody(), table=table, tenants=tenants, scopes=Scopes(tenants, b""), clock=clock
    )
    queue = TurnQueue(max_turns=1, max_queued=0, limits={})
    admission = Admission(turns=queue, queue_timeout_s=1.0, max_held_bytes=1024, clock=SystemClock())
    service = ConversationService(conversations, admission, body_limit_bytes=512, explain=explain)
    call: Any = Call()
    return list((await service.FindConversation(pb.FindConversationRequest(**wanted), call)).held)


async def test_a_set_is_told_once_with_its_model_and_holder_and_nothing_is_released() -> None:
    held = await find(Index(), session_id="trip")
    assert held == [pb.HeldSet(model="a", node_id="d1", engine_id="engine-1", set_id="set-1", token_count=70)]


async def test_only_the_model_that_is_named_is_looked_for() -> None:
    assert await find(Index(), session_id="trip", model="b") == []


async def test_a_router_that_may_name_no_nodes_does_not() -> None:
    with pytest.raises(FailedPreconditionError, match="EXPLAIN_OFF"):
        await find(Index(), explain=False, session_id="trip")


async def test_a_conversation_must_be_named() -> None:
    with pytest.raises(InvalidArgumentError):
        await find(Index())


async def test_a_body_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(ResourceExhaustedError, match="512 bytes"):
        await find(Index(), body=b"x" * 513)


async def test_a_registry_that_is_away_is_no_empty_answer() -> None:
    index = Index()
    index.failure = UnavailableError("ETCD_UNAVAILABLE", "no etcd")
    with pytest.raises(UnavailableError):
        await find(index, session_id="trip")
