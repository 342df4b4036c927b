"""How a publish stream or a search ends, where timing decides."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.errors import BackhaulError, DeadlineExceededError, UnavailableError
from backhaul_registry import convert
from backhaul_registry.etcd_store import PointerStore
from backhaul_registry.hub import Hub
from backhaul_registry.index_service import IndexService
from backhaul_registry.keys import Keys
from backhaul_registry.publishing import PublishStream
from backhaul_registry.records import Records
from tests.fakes import samples
from tests.fakes.clock import settle
from tests.fakes.etcd import FakeEtcd

KEYS = Keys("c")


class Context:
    """One call, as far as the service looks at it."""

    def __init__(self, *, remaining_s: float | None = None, cancelled: bool = False) -> None:
        self._remaining_s = remaining_s
        self._cancelled = cancelled
        self.written: list[Any] = []

    async def write(self, message: Any) -> None:
        self.written.append(message)

    def cancelled(self) -> bool:
        return self._cancelled

    def time_remaining(self) -> float | None:
        return self._remaining_s


async def requests() -> AsyncIterator[pb.PublishBlockSetsRequest]:
    yield pb.PublishBlockSetsRequest(open=pb.PublishBlockSetsRequest.Open(node_id="d1", engine_id="e1"))
    yield pb.PublishBlockSetsRequest(batch=pb.PublishBlockSetsRequest.Batch(nonce=1, upserts=[samples.pointer()]))


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd()


@pytest.fixture
def service(etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> IndexService:
    monkeypatch.setattr("backhaul_registry.index_service._CANCELLATION_S", 0.01)
    return service_on(etcd, answers=True)


def service_on(etcd: FakeEtcd, *, answers: bool) -> IndexService:
    records = Records(KEYS)
    hub: Hub[Any] = Hub(etcd, KEYS.index, records.read_pointer, etcd.clock, always=False)
    return IndexService(PointerStore(etcd, KEYS, records), hub, asyncio.Event(), ttl_s=30, etcd_answers=lambda: answers)


async def pointer_count(etcd: FakeEtcd) -> int:
    return len((await etcd.list_prefix(KEYS.index)).items)


async def test_a_half_close_purges(no_leaks: None, service: IndexService, etcd: FakeEtcd) -> None:
    context = Context()
    await service.PublishBlockSets(requests(), context)
    assert [message.WhichOneof("step") for message in context.written] == ["opened", "acknowledged"]
    assert await pointer_count(etcd) == 0


async def test_an_end_that_turns_out_to_be_a_break_does_not_purge(
    no_leaks: None, service: IndexService, etcd: FakeEtcd
) -> None:
    call = asyncio.create_task(service.PublishBlockSets(requests(), Context()))
    await settle()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pointer_count(etcd) == 1
    await service.PublishBlockSets(requests(), Context(cancelled=True))
    assert await pointer_count(etcd) == 1


async def test_a_search_without_time_left_reaches_no_etcd(service: IndexService, etcd: FakeEtcd) -> None:
    request = pb.FindBlockSetsRequest(scope="scope", keys=["k1"])
    with pytest.raises(DeadlineExceededError):
        await service.FindBlockSets(request, Context(remaining_s=0.001))
    assert etcd.calls == []
    await service.FindBlockSets(request, Context())
    assert etcd.calls == ["txn"]


async def test_a_lookup_asks_etcd_once(service: IndexService, etcd: FakeEtcd) -> None:
    await service.FindBlockSets(pb.FindBlockSetsRequest(scope="s", keys=[f"k{n}" for n in range(16)]), Context())
    assert etcd.calls == ["txn"]


@pytest.mark.parametrize(("pointer_count", "transactions"), [(1, 1), (100, 1), (101, 2), (1_000, 10)])
async def test_a_batch_asks_etcd_once_for_each_100_pointers(
    etcd: FakeEtcd, pointer_count: int, transactions: int
) -> None:
    stream = PublishStream(PointerStore(etcd, KEYS, Records(KEYS)), "d1", "e1", ttl_s=30)
    await stream.open()
    etcd.calls.clear()
    pointers = [convert.pointer_from_proto(samples.pointer(str(number))) for number in range(pointer_count)]
    await stream.take(1, pointers, ())
    assert etcd.calls == ["txn"] * transactions
    await stream.take(2, (), [pointer.id for pointer in pointers])
    assert etcd.calls == ["txn"] * 2 * transactions


class Passing(Context):
    """A call whose time passes: this is left of it whenever it is looked at."""

    def __init__(self, *left_s: float | None) -> None:
        super().__init__()
        self._left_s = iter(left_s)

    def time_remaining(self) -> float | None:
        return next(self._left_s)


@pytest.mark.parametrize(
    ("left_s", "answers", "error"),
    [
        pytest.param((0.05, 0.005), True, DeadlineExceededError, id="all of the caller's time"),
        pytest.param((0.05, 0.005), False, UnavailableError, id="nobody has an answer"),
        pytest.param((0.05, 0.04), True, UnavailableError, id="refused at once"),
        pytest.param((30.0, 28.0), True, UnavailableError, id="all that a search may take"),
        pytest.param((None, None), True, UnavailableError, id="no deadline"),
    ],
)
async def test_a_search_is_late_only_when_etcd_answers_and_the_caller_had_too_little_time(
    etcd: FakeEtcd, left_s: Sequence[float | None], answers: bool, error: type[BackhaulError]
) -> None:
    etcd.failure = UnavailableError("ETCD_UNAVAILABLE", "no answer in time")
    with pytest.raises(error):
        await service_on(etcd, answers=answers).FindBlockSets(
            pb.FindBlockSetsRequest(scope="scope", keys=["k1"]), Passing(*left_s)
        )
