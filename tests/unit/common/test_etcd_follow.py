"""Following a prefix: differences only, whatever happens to the watch."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from backhaul_common.errors import AbortedError, UnavailableError
from backhaul_common.etcd import Delete, Following, KeyValue, Listing, Outage, Put, Update, WatchBatch, follow
from tests.fakes.clock import FakeClock
from tests.fakes.etcd import FakeEtcd

AWAY = UnavailableError("ETCD_UNAVAILABLE", "away")


def kv(key: str, revision: int, value: bytes = b"v") -> KeyValue:
    return KeyValue(key.encode(), value, 1, revision, 0)


def batch(revision: int, upserts: tuple[KeyValue, ...] = (), removals: tuple[bytes, ...] = ()) -> WatchBatch:
    return WatchBatch(revision, upserts, removals, store_revision=revision, cluster_id=1)


def test_a_second_listing_tells_the_difference_only() -> None:
    following = Following()
    following.listed(Listing((kv("a", 1), kv("b", 2), kv("c", 3)), 5, False, 1))
    update = following.listed(Listing((kv("a", 1), kv("b", 7), kv("d", 8)), 9, False, 1))
    assert update == Update(9, (kv("b", 7), kv("d", 8)), (b"c",), listed=True)


@pytest.mark.parametrize(("revision", "cluster_id"), [(4, 1), (9, 2)], ids=["revision back", "other cluster"])
def test_another_history_is_told_whole(revision: int, cluster_id: int) -> None:
    following = Following()
    following.listed(Listing((kv("a", 1), kv("b", 2)), 5, False, 1))
    update = following.listed(Listing((kv("a", 1),), revision, False, cluster_id))
    assert update == Update(revision, (kv("a", 1),), (b"b",), listed=True, reset=True)


def test_a_restored_history_that_reached_the_same_revision_again_is_told() -> None:
    following = Following()
    following.listed(Listing((kv("a", 4), kv("b", 5)), 5, False, 1))
    update = following.listed(Listing((kv("a", 4), kv("b", 5, b"other")), 9, False, 1))
    assert update == Update(9, (kv("b", 5, b"other"),), listed=True)


def test_a_batch_moves_the_revision_and_a_sign_of_life_does_not() -> None:
    following = Following()
    following.listed(Listing((kv("a", 1),), 5, False, 1))
    assert following.changed(batch(99)) == Update(5)
    assert following.changed(batch(6, (kv("b", 6),), (b"a",))) == Update(6, (kv("b", 6),), (b"a",))
    assert following.changed(batch(7, (), (b"a",))) == Update(7)
    assert following.listed(Listing((kv("b", 6),), 8, False, 1)) == Update(8, listed=True)


@pytest.mark.parametrize(("store_revision", "cluster_id"), [(4, 1), (5, 2)], ids=["revision back", "other cluster"])
def test_a_watch_on_another_history_is_refused(store_revision: int, cluster_id: int) -> None:
    following = Following()
    following.listed(Listing((kv("a", 1),), 5, False, 1))
    with pytest.raises(AbortedError, match="ETCD_HISTORY"):
        following.changed(WatchBatch(9, (kv("b", 9),), (), store_revision, cluster_id))


class _NoSleep(FakeClock):
    async def sleep(self, seconds: float) -> None:
        self.slept = [*getattr(self, "slept", []), seconds]


async def news(items: AsyncGenerator[Update | Outage, None]) -> Update | Outage:
    async for item in items:
        if isinstance(item, Outage) or item.listed or item.upserts or item.removals:
            return item
    raise AssertionError("ended")


async def test_after_an_outage_and_a_compaction_the_difference_is_told(no_leaks: None) -> None:
    etcd = FakeEtcd()
    await etcd.txn([], [Put(b"/p/a", b"1"), Put(b"/p/b", b"1")])
    async with aclosing(follow(etcd, b"/p/", _NoSleep(), lambda: 0.5)) as items:
        await news(items)
        etcd.break_watches(AWAY)
        assert await news(items) == Outage(AWAY)
        assert await news(items) == Outage(AWAY)
        etcd.mend()
        await etcd.txn([], [Delete(b"/p/a"), Put(b"/p/c", b"1"), Put(b"/q", b"1")])
        etcd.compact()
        update = await news(items)
        assert isinstance(update, Update)
        assert ([item.key for item in update.upserts], update.removals) == ([b"/p/c"], (b"/p/a",))


async def test_pauses_grow_to_two_seconds_and_shrink_when_it_works_again(no_leaks: None) -> None:
    etcd, clock = FakeEtcd(), _NoSleep()
    etcd.failure = AWAY
    async with aclosing(follow(etcd, b"/p/", clock, lambda: 0.5)) as items:
        for _ in range(7):
            await news(items)
        assert clock.slept == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
        etcd.mend()
        await news(items)
        await anext(items)
        etcd.break_watches(AWAY)
        await news(items)
        etcd.mend()
        await news(items)
        assert clock.slept[-1] == 0.1
