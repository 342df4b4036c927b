"""What the registry counts, and what is read of its parts."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import pytest

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.errors import (
    AbortedError,
    BackhaulError,
    DeadlineExceededError,
    InternalError,
    UnavailableError,
)
from backhaul_common.etcd import Put
from backhaul_common.metering import OTHER
from backhaul_registry import instruments
from backhaul_registry.availability import Availability
from backhaul_registry.condition import Condition
from backhaul_registry.core.model import Node, NodeState, Pointer, Role
from backhaul_registry.etcd_store import PointerStore
from backhaul_registry.hub import Hub
from backhaul_registry.index_service import IndexService
from backhaul_registry.keys import Keys
from backhaul_registry.observing import EtcdCalls, observe_etcd, observe_watches
from backhaul_registry.records import Records
from tests.fakes import samples
from tests.fakes.clock import FakeClock, settle
from tests.fakes.etcd import FakeEtcd
from tests.fakes.readings import Readings
from tests.unit.registry.test_condition import FULL, GOOD, Etcd
from tests.unit.registry.test_index_service import Context, requests

KEYS = Keys("c")
RECORDS = Records(KEYS)


@contextmanager
def running(*parts: Hub[Node] | Hub[Pointer] | Availability | Condition) -> Iterator[None]:
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize(
    ("failure", "label"),
    [
        (None, ""),
        (AbortedError("A", ""), "aborted"),
        (UnavailableError("A", ""), "unavailable"),
        (DeadlineExceededError("A", ""), "deadline_exceeded"),
        (InternalError("A", ""), OTHER),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_of_etcd_are_counted_by_what_became_of_them(
    read: Readings, failure: BackhaulError | None, label: str
) -> None:
    times = iter((1.0, 1.25))
    calls = EtcdCalls(lambda: next(times))
    with suppress(BackhaulError), calls.measured("txn"):
        if failure is not None:
            raise failure
    [point] = read.points(instruments.ETCD_DURATION.name)
    assert (point.count, point.sum) == (1, 0.25)
    assert read.of(instruments.ETCD_DURATION) == {("etcd", "txn", label): 1}


async def test_whether_etcd_answers_and_has_space_is_read(read: Readings) -> None:
    etcd, told = FakeEtcd(), Etcd()

    async def ignore(_: object) -> None:
        return None

    availability = Availability(etcd, KEYS.nodes, etcd.clock, (ignore,))
    condition = Condition(told, etcd.clock, ignore)
    observe_etcd(availability, condition)
    levels = (instruments.ETCD_AVAILABLE, instruments.ETCD_FULL, instruments.ETCD_CORRUPT)
    assert [read.of(level)[()] for level in levels] == [0, 0, 0]
    with running(availability, condition):
        told.answer = GOOD
        await settle()
        assert [read.of(level)[()] for level in levels] == [1, 0, 0]
        told.answer = FULL
        await etcd.clock.advance(3)
        assert [read.of(level)[()] for level in levels] == [1, 1, 0]


async def test_watches_and_the_nodes_that_have_joined_are_read(read: Readings) -> None:
    etcd = FakeEtcd()
    nodes: Hub[Node] = Hub(etcd, KEYS.nodes, RECORDS.read_node, etcd.clock, always=True)
    pointers: Hub[Pointer] = Hub(etcd, KEYS.index, RECORDS.read_pointer, etcd.clock, always=False)
    observe_watches(nodes, pointers)
    with running(nodes, pointers):
        await settle()
        for node_id, state in (("d1", NodeState.READY), ("d2", NodeState.READY), ("p1", NodeState.NOT_READY)):
            node = Node(
                node_id=node_id, session="s", role=Role.DECODE, agent_address="a:1", engine_url="http://a", state=state
            )
            await etcd.txn([], [Put(KEYS.node(node_id), RECORDS.write_node(node), 0)])
        await settle()
        with nodes.watching():
            await nodes.subscribe(0, 0)
            assert read.of(instruments.WATCHERS) == {("nodes",): 1, ("pointers",): 0}
        assert read.of(instruments.WATCH_FOLLOWS) == {("nodes",): 1, ("pointers",): 0}
        assert read.of(instruments.NODES) == {("ready",): 2, ("not_ready",): 1, ("draining",): 0}
        assert read.of(instruments.WATCH_BREAKS) == {("nodes",): 0, ("pointers",): 0}
        etcd.break_watches(UnavailableError("ETCD_UNAVAILABLE", "away"))
        await settle()
        assert read.of(instruments.WATCH_FOLLOWS) == {("nodes",): 0, ("pointers",): 0}
        assert read.of(instruments.WATCH_BREAKS) == {("nodes",): 1, ("pointers",): 0}


async def test_lookups_and_pointers_are_counted(read: Readings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul_registry.index_service._CANCELLATION_S", 0.01)
    etcd = FakeEtcd()
    hub: Hub[Pointer] = Hub(etcd, KEYS.index, RECORDS.read_pointer, FakeClock(), always=False)
    service = IndexService(PointerStore(etcd, KEYS, RECORDS), hub, asyncio.Event(), ttl_s=30, etcd_answers=lambda: True)
    over = asyncio.Event()

    async def lasting() -> AsyncIterator[pb.PublishBlockSetsRequest]:
        async for request in requests():
            yield request
        await over.wait()

    call = asyncio.create_task(service.PublishBlockSets(lasting(), Context()))
    await settle()
    found = samples.pointer()
    assert read.of(instruments.PUBLISHERS) == {(): 1}
    for key in (found.key, "unknown"):
        await service.FindBlockSets(pb.FindBlockSetsRequest(scope=found.scope, keys=[key]), Context())
    over.set()
    await call
    assert read.of(instruments.LOOKUPS) == {("found",): 1, ("nothing",): 1}
    assert read.of(instruments.POINTER_CHANGES) == {("written",): 1, ("removed",): 0}
    assert read.of(instruments.PUBLISHERS) == {(): 0}
