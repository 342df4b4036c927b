"""The registry's stores, on etcd in memory and on a real one."""

import uuid
from typing import Any

import pytest

from backhaul_common.errors import AbortedError, AlreadyExistsError, FailedPreconditionError, InvalidArgumentError
from backhaul_common.etcd import Delete, Get, Lease, Put
from backhaul_registry import convert
from backhaul_registry.core.ledger import Removal, Upsert
from backhaul_registry.core.model import Node, NodeState, Pointer, PointerId, Role
from backhaul_registry.etcd_store import Mark, NodeStore, PointerStore
from backhaul_registry.keys import Keys
from backhaul_registry.records import Records
from tests.contract.conftest import Backend


def node(session: str = "s1", node_id: str = "d1", reason: str = "") -> Node:
    return Node(
        node_id=node_id,
        session=session,
        role=Role.DECODE,
        agent_address="h:1",
        engine_url="http://h:2",
        state=NodeState.READY,
        state_reason=reason,
    )


def pointer(set_id: str, key: str = "k", scope: str = "s") -> Pointer:
    return Pointer(
        scope=scope,
        key=key,
        set_id=set_id,
        engine_id="e",
        node_id="d1",
        token_count=64,
        digest=bytes(16),
        stride=64,
        identity=bytes(16),
    )


def mark(lease: Lease, stream_id: str = "") -> Mark:
    return Mark(stream_id or uuid.uuid4().hex, lease.lease_id)


@pytest.fixture
def keys(backend: Backend) -> Keys:
    return Keys(backend.prefix)


@pytest.fixture
def nodes(backend: Backend, keys: Keys) -> NodeStore:
    return NodeStore(backend.etcd, keys, Records(keys))


@pytest.fixture
def pointers(backend: Backend, keys: Keys) -> PointerStore:
    return PointerStore(backend.etcd, keys, Records(keys))


async def listed(nodes: NodeStore) -> tuple[Node, ...]:
    return (await nodes.list())[0]


async def test_a_node_is_there_while_its_lease_lives(backend: Backend, nodes: NodeStore) -> None:
    lease = await nodes.join(node(), ttl_s=2, lease_id=0)
    await backend.wait(1.2)
    assert (await nodes.keep(node(), lease.lease_id)).ttl_s == 2
    await backend.wait(1.2)
    assert await listed(nodes) == (node(),)
    await backend.wait(3)
    assert await listed(nodes) == ()
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await nodes.keep(node(), lease.lease_id)


async def test_a_node_leaves_at_once_and_makes_room(nodes: NodeStore) -> None:
    lease = await nodes.join(node(), ttl_s=30, lease_id=0)
    await nodes.leave(lease.lease_id)
    await nodes.join(node("s2"), ttl_s=30, lease_id=0)
    assert await listed(nodes) == (node("s2"),)


async def test_nodes_are_listed_by_id(nodes: NodeStore) -> None:
    for node_id in ("b", "a", "c"):
        await nodes.join(node(node_id=node_id), ttl_s=30, lease_id=0)
    assert [item.node_id for item in await listed(nodes)] == ["a", "b", "c"]


async def test_a_held_node_is_refused_and_the_new_lease_is_not_left_behind(backend: Backend, nodes: NodeStore) -> None:
    lease = await nodes.join(node("s1"), ttl_s=30, lease_id=0)
    granted: list[int] = []
    grant = backend.etcd.grant

    async def record(ttl_s: float) -> Any:
        granted.append((made := await grant(ttl_s)).lease_id)
        return made

    nodes._etcd = _With(backend.etcd, grant=record)
    with pytest.raises(AlreadyExistsError, match="NODE_TAKEN"):
        await nodes.join(node("s2"), ttl_s=30, lease_id=0)
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await backend.etcd.ttl_s(granted[0])
    assert await listed(nodes) == (node("s1"),)
    await nodes.keep(node("s1"), lease.lease_id)


async def test_a_session_adopts_its_lease(nodes: NodeStore) -> None:
    lease = await nodes.join(node(), ttl_s=30, lease_id=0)
    adopted = await nodes.join(node(reason="again"), ttl_s=10, lease_id=lease.lease_id)
    assert (adopted.lease_id, adopted.ttl_s) == (lease.lease_id, 30)
    assert await listed(nodes) == (node(reason="again"),)


async def test_a_session_that_joins_anew_ends_its_old_lease(backend: Backend, nodes: NodeStore) -> None:
    old = await nodes.join(node(), ttl_s=30, lease_id=0)
    new = await nodes.join(node(), ttl_s=30, lease_id=0)
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await backend.etcd.ttl_s(old.lease_id)
    assert await listed(nodes) == (node(),)
    await nodes.keep(node(), new.lease_id)


async def test_a_join_whose_answer_was_lost_is_no_obstacle_to_itself(backend: Backend, nodes: NodeStore) -> None:
    lost = True
    txn = backend.etcd.txn

    async def lossy(*args: Any, **options: Any) -> Any:
        nonlocal lost
        result = await txn(*args, **options)
        if lost:
            lost = False
            return await txn(*args, **options)
        return result

    nodes._etcd = _With(backend.etcd, txn=lossy)
    lease = await nodes.join(node(), ttl_s=30, lease_id=0)
    assert await listed(nodes) == (node(),)
    await nodes.keep(node(), lease.lease_id)


async def test_keeping_restores_a_deleted_record_and_an_update_replaces_it(
    backend: Backend, nodes: NodeStore, keys: Keys
) -> None:
    lease = await nodes.join(node(), ttl_s=30, lease_id=0)
    await backend.etcd.txn([], [Delete(keys.node("d1"))])
    await nodes.keep(node(), lease.lease_id)
    assert await listed(nodes) == (node(),)
    await nodes.keep(node(reason="new"), lease.lease_id)
    assert await listed(nodes) == (node(reason="new"),)


async def test_keeping_renews_a_record_that_went_back_in_time(backend: Backend, nodes: NodeStore, keys: Keys) -> None:
    lease = await nodes.join(node(reason="old"), ttl_s=30, lease_id=0)
    (old,) = (await backend.etcd.range(Get(keys.node("d1")))).items
    await nodes.keep(node(reason="new"), lease.lease_id)
    await backend.etcd.txn([], [Put(old.key, old.value, old.lease_id)])
    await nodes.keep(node(reason="new"), lease.lease_id)
    assert await listed(nodes) == (node(reason="new"),)


async def test_a_full_etcd_keeps_the_record_that_is_there_and_takes_none_anew(
    backend: Backend, nodes: NodeStore, keys: Keys
) -> None:
    lease = await nodes.join(node(), ttl_s=30, lease_id=0)

    async def full(*args: Any, **options: Any) -> Any:
        raise FailedPreconditionError("ETCD_NO_SPACE", "full")

    nodes._etcd = _With(backend.etcd, txn=full)
    assert (await nodes.keep(node(reason="new"), lease.lease_id)).ttl_s == 30
    assert (await nodes.join(node(reason="new"), ttl_s=30, lease_id=lease.lease_id)).lease_id == lease.lease_id
    assert await listed(nodes) == (node(),)
    with pytest.raises(FailedPreconditionError):
        await nodes.join(node(node_id="d2"), ttl_s=30, lease_id=0)
    await backend.etcd.txn([], [Delete(keys.node("d1"))])
    with pytest.raises(FailedPreconditionError):
        await nodes.keep(node(), lease.lease_id)
    nodes._etcd = backend.etcd
    await nodes.keep(node(reason="new"), lease.lease_id)
    assert await listed(nodes) == (node(reason="new"),)


async def test_keeping_fails_once_another_session_has_the_record(
    backend: Backend, nodes: NodeStore, keys: Keys
) -> None:
    lease = await nodes.join(node("s1"), ttl_s=30, lease_id=0)
    await backend.etcd.txn([], [Delete(keys.node("d1"))])
    await nodes.join(node("s2"), ttl_s=30, lease_id=0)
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await nodes.keep(node("s1"), lease.lease_id)
    assert await listed(nodes) == (node("s2"),)


async def test_an_unreadable_record_is_overwritten_by_a_join(backend: Backend, nodes: NodeStore, keys: Keys) -> None:
    await backend.etcd.txn([], [Put(keys.node("d1"), b"garbage")])
    assert await listed(nodes) == ()
    await nodes.join(node(), ttl_s=30, lease_id=0)
    assert await listed(nodes) == (node(),)


async def test_finding_returns_the_newest_16_of_each_key_in_the_order_of_the_keys(pointers: PointerStore) -> None:
    lease = await pointers.grant(30)
    for number in range(18):
        await pointers.write([Upsert(pointer(f"{number:02}"), lease.lease_id)], mark(lease))
    await pointers.write([Upsert(pointer("x", key="k2"), lease.lease_id)], mark(lease))
    found = await pointers.find("s", ["k2", "k"], timeout_s=2)
    assert [p.set_id for p in found] == ["x", *(f"{number:02}" for number in range(17, 1, -1))]


async def test_many_writes_go_in_several_transactions(pointers: PointerStore) -> None:
    lease = await pointers.grant(30)
    await pointers.write([Upsert(pointer(f"{number}"), lease.lease_id) for number in range(250)], mark(lease))
    page, token = await pointers.page("", 5000, "")
    assert (len(page), token) == (250, "")
    await pointers.write([Removal(p.id) for p in page], mark(lease))
    assert await pointers.page("", 5000, "") == ((), "")


async def test_writing_under_a_lost_lease_fails(pointers: PointerStore) -> None:
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await pointers.write([Upsert(pointer("a"), 12345)], mark(Lease(12345, 30)))


@pytest.mark.parametrize("goes_back", [True, False], ids=["older mark", "no mark"])
async def test_a_mark_shows_that_etcd_lost_what_was_written_with_it(
    backend: Backend, pointers: PointerStore, keys: Keys, goes_back: bool
) -> None:
    lease = await pointers.grant(30)
    first = await pointers.write([Upsert(pointer("a"), lease.lease_id)], mark(lease, "stream"))
    (old,) = (await backend.etcd.range(Get(keys.stream("stream")))).items
    second = await pointers.write([Upsert(pointer("b"), lease.lease_id)], first)
    await pointers.check(second)
    await backend.etcd.txn([], [Put(old.key, old.value, old.lease_id) if goes_back else Delete(old.key)])
    with pytest.raises(AbortedError, match="HISTORY_LOST"):
        await pointers.check(second)
    with pytest.raises(AbortedError, match="HISTORY_LOST"):
        await pointers.write([Upsert(pointer("c"), lease.lease_id)], second)
    assert [p.set_id for p in (await pointers.page("", 10, ""))[0]] == ["a", "b"]


async def test_a_write_whose_answer_was_lost_is_no_loss(backend: Backend, pointers: PointerStore) -> None:
    lease = await pointers.grant(30)
    txn = backend.etcd.txn

    async def twice(*args: Any, **options: Any) -> Any:
        await txn(*args, **options)
        return await txn(*args, **options)

    pointers._etcd = _With(backend.etcd, txn=twice)
    written = await pointers.write([Upsert(pointer(f"{n}"), lease.lease_id) for n in range(250)], mark(lease))
    await pointers.check(await pointers.write([Removal(pointer("0").id)], written))
    assert len((await pointers.page("", 5000, ""))[0]) == 249


async def test_purging_spares_what_moved_to_another_lease(backend: Backend, pointers: PointerStore) -> None:
    old, new = await pointers.grant(30), await pointers.grant(30)
    await pointers.write([Upsert(pointer(f"{number}"), old.lease_id) for number in range(150)], mark(old))
    await pointers.write([Upsert(pointer("7"), new.lease_id)], mark(new))
    await pointers.purge(old.lease_id, [PointerId("s", "k", f"{number}") for number in range(150)])
    assert [p.set_id for p in await pointers.find("s", ["k"], timeout_s=2)] == ["7"]
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await pointers.renew(old.lease_id)


async def test_removing_counts_what_was_there(pointers: PointerStore) -> None:
    lease = await pointers.grant(30)
    await pointers.write([Upsert(pointer("a"), lease.lease_id)], mark(lease))
    gone = [PointerId("s", "k", "a"), PointerId("s", "k", "a"), PointerId("s", "k", "b")]
    assert [await pointers.remove(gone), await pointers.remove(gone)] == [1, 0]


async def test_pages_follow_one_another(pointers: PointerStore) -> None:
    lease = await pointers.grant(30)
    await pointers.write([Upsert(pointer(f"{n}", scope=f"s{n % 2}"), lease.lease_id) for n in range(6)], mark(lease))
    first, token = await pointers.page("s1", 2, "")
    second, end = await pointers.page("s1", 2, token)
    assert [p.set_id for p in (*first, *second)] == ["1", "3", "5"]
    assert end == ""
    with pytest.raises(InvalidArgumentError, match="PAGE_TOKEN_INVALID"):
        await pointers.page("s1", 2, "!")


async def test_a_pointer_that_contradicts_its_key_is_not_found(
    backend: Backend, pointers: PointerStore, keys: Keys
) -> None:
    value = b"\x02" + convert.pointer_to_proto(pointer("a", scope="other")).SerializeToString()
    await backend.etcd.txn([], [Put(keys.pointer(PointerId("s", "k", "a")), value)])
    assert await pointers.find("s", ["k"], timeout_s=2) == ()


class _With:
    """An etcd of which some calls are replaced."""

    def __init__(self, etcd: Any, **calls: Any) -> None:
        self._etcd = etcd
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.get(name) or getattr(self._etcd, name)
