import asyncio

import pytest

from backhaul_common.errors import AbortedError, InvalidArgumentError, UnavailableError
from backhaul_registry.core.ledger import Ledger
from backhaul_registry.etcd_store import PointerStore
from backhaul_registry.keys import Keys
from backhaul_registry.publishing import PublishStream
from backhaul_registry.records import Records
from tests.fakes.etcd import FakeEtcd
from tests.unit.registry.values import pointer

KEYS = Keys("c")


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd()


@pytest.fixture
def store(etcd: FakeEtcd) -> PointerStore:
    return PointerStore(etcd, KEYS, Records(KEYS))


def stream_on(store: PointerStore, etcd: FakeEtcd, max_keys: int = 10_000) -> PublishStream:
    return PublishStream(store, "d1", "e1", ttl_s=30, clock=etcd.clock, ledger=Ledger(max_keys))


async def found(store: PointerStore) -> list[str]:
    return sorted(item.set_id for item in (await store.page("", 100, ""))[0])


async def test_pointers_spread_over_leases_and_all_are_kept_alive(
    no_leaks: None, store: PointerStore, etcd: FakeEtcd
) -> None:
    stream = stream_on(store, etcd, max_keys=2)
    assert await stream.open() == 30
    await stream.take(1, [pointer(str(number)) for number in range(5)], [])
    assert etcd.calls.count("grant") == 3
    keeping = asyncio.create_task(stream.keep_leases())
    await etcd.clock.advance(300)
    assert len(await found(store)) == 5
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await etcd.clock.advance(31)
    assert await found(store) == []


async def test_an_outage_shorter_than_the_ttl_is_survived(no_leaks: None, store: PointerStore, etcd: FakeEtcd) -> None:
    stream = stream_on(store, etcd)
    await stream.open()
    await stream.take(1, [pointer()], [])
    keeping = asyncio.create_task(stream.keep_leases())
    await etcd.clock.advance(9)
    etcd.failure = UnavailableError("ETCD_UNAVAILABLE", "away")
    await etcd.clock.advance(20)
    etcd.mend()
    await etcd.clock.advance(20)
    assert await found(store) == ["set-1"]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_lost_lease_is_reported(no_leaks: None, store: PointerStore, etcd: FakeEtcd) -> None:
    stream = stream_on(store, etcd)
    await stream.open()
    keeping = asyncio.create_task(stream.keep_leases())
    await etcd.clock.advance(1)
    await etcd.revoke(1)
    await etcd.clock.advance(10)
    with pytest.raises(AbortedError, match="LEASE_LOST"):
        await keeping


@pytest.mark.parametrize("count", [0, 1, 3], ids=["before any batch", "one batch", "several"])
async def test_what_etcd_no_longer_has_is_reported_although_the_lease_lives(
    no_leaks: None, store: PointerStore, etcd: FakeEtcd, count: int
) -> None:
    stream = stream_on(store, etcd)
    await stream.open()
    for number in range(count):
        await stream.take(number + 1, [pointer(str(number))], [])
    keeping = asyncio.create_task(stream.keep_leases())
    await etcd.clock.advance(15)
    old, at = (await etcd.list_prefix(b"/c/")).items, etcd.revision
    await stream.take(10, [pointer("new")], [])
    await etcd.clock.advance(15)
    assert not keeping.done()
    etcd.restore(old, at)
    await etcd.clock.advance(10)
    with pytest.raises(AbortedError, match="HISTORY_LOST"):
        await keeping


async def test_a_batch_after_a_loss_writes_nothing(store: PointerStore, etcd: FakeEtcd) -> None:
    stream = stream_on(store, etcd)
    await stream.open()
    await stream.take(1, [pointer("old")], [])
    old, at = (await etcd.list_prefix(b"/c/")).items, etcd.revision
    await stream.take(2, [pointer("lost")], [])
    etcd.restore(old, at)
    with pytest.raises(AbortedError, match="HISTORY_LOST"):
        await stream.take(3, [pointer("new")], [])
    assert await found(store) == ["old"]


async def test_a_wrong_batch_writes_nothing(store: PointerStore, etcd: FakeEtcd) -> None:
    stream = stream_on(store, etcd)
    await stream.open()
    for upserts in ([pointer(), pointer("x", digest=b"")], [pointer(engine_id="e2")], [pointer(node_id="d2")]):
        with pytest.raises(InvalidArgumentError):
            await stream.take(etcd.revision + 5, upserts, [])
    await stream.take(100, [], [])
    with pytest.raises(InvalidArgumentError, match="NOT_INCREASING"):
        await stream.take(100, [pointer()], [])
    assert await found(store) == []


async def test_a_purge_removes_pointers_and_leases_in_steps(store: PointerStore, etcd: FakeEtcd) -> None:
    stream = stream_on(store, etcd, max_keys=150)
    await stream.open()
    await stream.take(1, [pointer(str(number)) for number in range(300)], [])
    etcd.calls.clear()
    await stream.purge()
    assert etcd.calls == ["txn", "txn", "revoke"] * 2
    assert await found(store) == []
