import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backhaul_common.errors import ResourceExhaustedError, UnavailableError
from backhaul_common.etcd import Delete, KeyValue, Put
from backhaul_registry.core.feed import Change
from backhaul_registry.hub import QUEUE_LENGTH, Hub, Subscription
from tests.fakes.clock import FakeClock, settle
from tests.fakes.etcd import FakeEtcd


def read(kv: KeyValue) -> str | None:
    return None if kv.value == b"garbage" else kv.value.decode()


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd()


async def hub_on(etcd: FakeEtcd, *, always: bool) -> AsyncIterator[Hub[str]]:
    hub: Hub[str] = Hub(etcd, b"/p/", read, etcd.clock, always=always)
    task = asyncio.create_task(hub.run())
    await settle()
    yield hub
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def hub(no_leaks: None, etcd: FakeEtcd) -> AsyncIterator[Hub[str]]:
    async for hub in hub_on(etcd, always=True):
        yield hub


@pytest.fixture
async def lazy(no_leaks: None, etcd: FakeEtcd) -> AsyncIterator[Hub[str]]:
    async for hub in hub_on(etcd, always=False):
        yield hub


def block(seconds: float) -> None:
    """Keeps the event loop busy, so that it finds several timers due at once."""
    time.sleep(seconds)


async def put(etcd: FakeEtcd, name: str, value: bytes = b"v") -> None:
    await etcd.txn([], [Put(f"/p/{name}".encode(), value)])
    await settle()


async def next_change(subscription: Subscription[str]) -> Any:
    change = await subscription.next(5)
    assert change is not None
    return change


async def test_every_client_hears_of_every_change_over_one_watch(hub: Hub[str], etcd: FakeEtcd) -> None:
    clients = [await hub.subscribe(0, 0) for _ in range(50)]
    await put(etcd, "a")
    for client in clients:
        assert (await next_change(client)).upserts == {"/p/a": "v"}
    await etcd.txn([], [Delete(b"/p/a")])
    await settle()
    for client in clients:
        assert set((await next_change(client)).removals) == {"/p/a"}
    assert etcd.calls.count("watch") == 1


async def test_garbage_is_gone_and_later_news_go_on(hub: Hub[str], etcd: FakeEtcd) -> None:
    client = await hub.subscribe(0, 0)
    await put(etcd, "a")
    await put(etcd, "a", b"garbage")
    await put(etcd, "b", b"garbage")
    await put(etcd, "c")
    assert set((await next_change(client)).upserts) == {"/p/a"}
    assert set((await next_change(client)).removals) == {"/p/a"}
    assert set((await next_change(client)).upserts) == {"/p/c"}


async def test_a_client_that_does_not_read_is_ended_and_others_are_not(hub: Hub[str], etcd: FakeEtcd) -> None:
    slow, quick = await hub.subscribe(0, 0), await hub.subscribe(0, 0)
    for number in range(QUEUE_LENGTH + 1):
        await put(etcd, f"{number}")
        await next_change(quick)
    with pytest.raises(ResourceExhaustedError, match="WATCH_TOO_SLOW"):
        await slow.next(5)
    await put(etcd, "last")
    assert set((await next_change(quick)).upserts) == {"/p/last"}


async def test_a_client_resumes_over_an_outage_with_the_difference(hub: Hub[str], etcd: FakeEtcd) -> None:
    await put(etcd, "a")
    seen = hub.quiet()
    client = await hub.subscribe(0, 0)
    etcd.break_watches(UnavailableError("ETCD_UNAVAILABLE", "away"))
    await settle()
    etcd.mend()
    await put(etcd, "b")
    await etcd.txn([], [Delete(b"/p/a")])
    etcd.compact()
    await etcd.clock.advance(10)
    change = await next_change(client)
    assert (set(change.upserts), set(change.removals)) == ({"/p/b"}, {"/p/a"})
    assert [set(missed.upserts) for missed in (await hub.subscribe(seen.revision, seen.digest)).opening.missed] == [
        {"/p/b"}
    ]


async def away(etcd: FakeEtcd) -> None:
    etcd.break_watches(UnavailableError("ETCD_UNAVAILABLE", "away"))
    await settle()


async def test_nobody_is_told_that_all_is_quiet_while_etcd_is_away(hub: Hub[str], etcd: FakeEtcd) -> None:
    await put(etcd, "a")
    seen = hub.quiet()
    assert hub.following
    await away(etcd)
    assert not hub.following
    with pytest.raises(UnavailableError, match="ETCD_UNAVAILABLE"):
        hub.quiet()
    etcd.mend()
    await etcd.clock.advance(10)
    assert hub.following
    assert hub.quiet() == seen


async def test_a_client_that_comes_back_while_etcd_is_away_waits_for_news(hub: Hub[str], etcd: FakeEtcd) -> None:
    await put(etcd, "a")
    seen = hub.quiet()
    await away(etcd)
    coming = asyncio.create_task(hub.subscribe(seen.revision, seen.digest))
    await settle()
    assert not coming.done()
    etcd.mend()
    await put(etcd, "b")
    await etcd.clock.advance(10)
    assert [set(missed.upserts) for missed in (await coming).opening.missed] == [{"/p/b"}]


async def test_a_client_that_comes_back_is_refused_when_etcd_stays_away(
    hub: Hub[str], etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backhaul_registry.hub.LISTING_S", 0.001)
    seen = hub.quiet()
    await away(etcd)
    with pytest.raises(UnavailableError, match="ETCD_UNAVAILABLE"):
        await hub.subscribe(seen.revision, seen.digest)


async def test_a_client_that_knows_nothing_is_told_what_there_was_last_and_ended_while_etcd_is_away(
    hub: Hub[str], etcd: FakeEtcd
) -> None:
    await put(etcd, "a")
    await away(etcd)
    client = await hub.subscribe(0, 0)
    assert client.opening.snapshot == {"/p/a": "v"}
    with pytest.raises(UnavailableError, match="ETCD_UNAVAILABLE"):
        await client.next(5)


async def test_another_history_ends_all_clients(hub: Hub[str], etcd: FakeEtcd) -> None:
    await put(etcd, "a")
    old = (await etcd.list_prefix(b"/p/")).items
    at = etcd.revision
    await put(etcd, "b")
    client = await hub.subscribe(0, 0)
    etcd.break_watches(UnavailableError("ETCD_UNAVAILABLE", "away"))
    await settle()
    etcd.mend()
    etcd.restore(old, at)
    await etcd.clock.advance(10)
    with pytest.raises(UnavailableError, match="HISTORY_LOST"):
        await client.next(5)
    again = await hub.subscribe(client.opening.revision, client.opening.digest)
    assert again.opening.snapshot == {"/p/a": "v"}


async def test_ending_all_ends_clients_once_with_the_first_reason(hub: Hub[str]) -> None:
    client = await hub.subscribe(0, 0)
    hub.end_all(UnavailableError("FIRST", ""))
    hub.end_all(UnavailableError("SECOND", ""))
    with pytest.raises(UnavailableError, match="FIRST"):
        await client.next(5)


async def test_a_change_in_the_moment_of_silence_is_not_overtaken_by_a_sign_of_life(hub: Hub[str]) -> None:
    client = await hub.subscribe(0, 0)
    waiting = asyncio.create_task(client.next(0.001))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.002, client.offer, Change(99, {"/p/late": "v"}, {}, 0))
    block(0.003)
    change = await waiting
    assert change is not None
    assert change.revision == 99


async def test_silence_is_none(hub: Hub[str]) -> None:
    assert await (await hub.subscribe(0, 0)).next(0.001) is None


async def test_a_hub_on_demand_follows_only_while_somebody_watches(lazy: Hub[str], etcd: FakeEtcd) -> None:
    await put(etcd, "a")
    assert etcd.calls.count("watch") == 0
    for turn in range(3):
        with lazy.watching(), lazy.watching():
            client = await lazy.subscribe(0, 0)
            assert client.opening.snapshot == {"/p/a": "v"}
            lazy.unsubscribe(client)
        await settle()
        assert (lazy.following, lazy.items) == (False, {})
        assert etcd.calls.count("watch") == turn + 1


async def test_a_client_does_not_wait_for_ever_for_an_etcd_that_is_away(
    etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backhaul_registry.hub.LISTING_S", 0.001)
    etcd.break_watches(UnavailableError("ETCD_UNAVAILABLE", "away"))
    hub: Hub[str] = Hub(etcd, b"/p/", read, FakeClock(), always=True)
    with pytest.raises(UnavailableError, match="ETCD_UNAVAILABLE"):
        await hub.subscribe(0, 0)
