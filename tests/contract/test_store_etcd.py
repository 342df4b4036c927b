"""What the stores count on in etcd."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from backhaul_common.errors import AbortedError
from backhaul_common.etcd import (
    Absent,
    Delete,
    Get,
    LeaseIs,
    Outage,
    Put,
    Unchanged,
    Update,
    follow,
    prefix_end,
)
from tests.contract.conftest import Backend


@pytest.fixture
def key(backend: Backend) -> bytes:
    return f"/{backend.prefix}/a".encode()


async def put(backend: Backend, key: bytes, value: bytes = b"v", lease_id: int = 0) -> int:
    revision: int = (await backend.etcd.txn([], [Put(key, value, lease_id)])).revision
    return revision


async def test_create_if_absent_happens_once_and_reports_the_winner(backend: Backend, key: bytes) -> None:
    first = await backend.etcd.txn([Absent(key)], [Put(key, b"1")], [Get(key)])
    second = await backend.etcd.txn([Absent(key)], [Put(key, b"2")], [Get(key)])
    assert (first.succeeded, second.succeeded) == (True, False)
    assert [kv.value for kv in second.reads[0]] == [b"1"]
    assert second.reads[0][0].create_revision == second.reads[0][0].mod_revision == first.revision


async def test_an_update_of_an_unchanged_key_succeeds_once(backend: Backend, key: bytes) -> None:
    seen = await put(backend, key)
    assert (await backend.etcd.txn([Unchanged(key, seen)], [Put(key, b"2")])).succeeded
    assert not (await backend.etcd.txn([Unchanged(key, seen)], [Put(key, b"3")])).succeeded


async def test_a_comparison_of_the_lease_fails_for_another_lease_and_for_a_missing_key(
    backend: Backend, key: bytes
) -> None:
    lease = await backend.etcd.grant(30)
    assert not (await backend.etcd.txn([LeaseIs(key, lease.lease_id)], [])).succeeded
    await put(backend, key, lease_id=lease.lease_id)
    assert (await backend.etcd.txn([LeaseIs(key, lease.lease_id)], [])).succeeded
    assert not (await backend.etcd.txn([LeaseIs(key, lease.lease_id + 1)], [])).succeeded


async def test_deleting_counts_what_was_there(backend: Backend, key: bytes) -> None:
    await put(backend, key)
    result = await backend.etcd.txn([], [Delete(key), Delete(key + b"2")])
    assert result.deleted == 1
    assert (await backend.etcd.range(Get(key))).items == ()


async def test_reading_newest_first_goes_by_creation_and_is_cut(backend: Backend, key: bytes) -> None:
    for name in (b"3", b"1", b"2"):
        await put(backend, key + name)
    await put(backend, key + b"3", b"again")
    result = await backend.etcd.txn([], [Get(key, prefix_end(key), limit=2, newest_first=True)])
    assert [kv.key.removeprefix(key) for kv in result.reads[0]] == [b"2", b"1"]


async def test_a_range_goes_by_key_and_says_whether_there_is_more(backend: Backend, key: bytes) -> None:
    for name in (b"3", b"1", b"2"):
        await put(backend, key + name)
    listing = await backend.etcd.range(Get(key, prefix_end(key), limit=2))
    assert ([kv.key.removeprefix(key) for kv in listing.items], listing.more) == ([b"1", b"2"], True)
    whole = await backend.etcd.list_prefix(key)
    assert (len(whole.items), whole.more) == (3, False)


async def test_a_key_ends_with_its_lease(backend: Backend, key: bytes) -> None:
    lease = await backend.etcd.grant(2)
    await put(backend, key, lease_id=lease.lease_id)
    await backend.wait(1)
    assert (await backend.etcd.keep_alive_once(lease.lease_id)).ttl_s == 2
    await backend.wait(1.2)
    assert len((await backend.etcd.range(Get(key))).items) == 1
    await backend.wait(3)
    assert (await backend.etcd.range(Get(key))).items == ()
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await backend.etcd.keep_alive_once(lease.lease_id)


async def test_a_key_written_under_another_lease_no_longer_ends_with_the_first(backend: Backend, key: bytes) -> None:
    first, second = await backend.etcd.grant(30), await backend.etcd.grant(30)
    await put(backend, key, lease_id=first.lease_id)
    await put(backend, key, lease_id=second.lease_id)
    await backend.etcd.revoke(first.lease_id)
    assert len((await backend.etcd.range(Get(key))).items) == 1
    await backend.etcd.revoke(second.lease_id)
    assert (await backend.etcd.range(Get(key))).items == ()


async def test_revoking_twice_is_no_error_and_writing_under_a_lost_lease_is(backend: Backend, key: bytes) -> None:
    lease = await backend.etcd.grant(30)
    assert 0 < await backend.etcd.ttl_s(lease.lease_id) <= 30
    await backend.etcd.revoke(lease.lease_id)
    await backend.etcd.revoke(lease.lease_id)
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await put(backend, key, lease_id=lease.lease_id)
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await backend.etcd.ttl_s(lease.lease_id)


async def changes(batches: AsyncIterator[Any]) -> Any:
    async with asyncio.timeout(5):
        async for batch in batches:
            if batch.upserts or batch.removals:
                return batch
    raise AssertionError("the watch ended")


async def test_a_watch_tells_everything_from_its_revision_on(backend: Backend, key: bytes) -> None:
    first = await put(backend, key + b"1")
    await put(backend, key + b"2")
    async with aclosing(backend.etcd.watch(key, first + 1)) as batches:
        batch = await changes(batches)
        assert [kv.key for kv in batch.upserts] == [key + b"2"]
        await backend.etcd.txn([], [Put(key + b"3", b"v"), Delete(key + b"1"), Put(key[:-1] + b"zz", b"elsewhere")])
        batch = await changes(batches)
        assert ([kv.key for kv in batch.upserts], batch.removals) == ([key + b"3"], (key + b"1",))


async def updates(items: AsyncIterator[Update | Outage]) -> Update:
    async with asyncio.timeout(5):
        async for item in items:
            if isinstance(item, Update) and (item.upserts or item.removals or item.listed):
                return item
    raise AssertionError("ended")


async def test_following_lists_first_and_then_tells_changes(backend: Backend, key: bytes) -> None:
    await put(backend, key + b"1")
    async with aclosing(follow(backend.etcd, key, backend.clock)) as items:
        listed = await updates(items)
        assert (listed.listed, [kv.key for kv in listed.upserts]) == (True, [key + b"1"])
        await backend.etcd.txn([], [Delete(key + b"1"), Put(key + b"2", b"v")])
        update = await updates(items)
        assert ([kv.key for kv in update.upserts], update.removals) == ([key + b"2"], (key + b"1",))
        assert update.revision > listed.revision
