import asyncio

from backhaul_common.errors import BackhaulError, UnavailableError
from backhaul_registry.availability import Availability
from tests.fakes.etcd import FakeEtcd


async def test_listeners_are_told_of_changes_only(no_leaks: None) -> None:
    etcd = FakeEtcd()
    told: list[str | None] = []

    async def listen(problem: BackhaulError | None) -> None:
        told.append(None if problem is None else problem.reason)

    etcd.failure = UnavailableError("ETCD_UNAVAILABLE", "away")
    task = asyncio.create_task(Availability(etcd, b"/", etcd.clock, (listen,)).run())
    await etcd.clock.advance(5)
    assert told == ["ETCD_UNAVAILABLE"]
    etcd.mend()
    await etcd.clock.advance(5)
    assert told == ["ETCD_UNAVAILABLE", None]
    etcd.failure = UnavailableError("ETCD_BUSY", "busy")
    await etcd.clock.advance(5)
    assert told == ["ETCD_UNAVAILABLE", None, "ETCD_BUSY"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
