import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from backhaul_common.errors import UnavailableError
from backhaul_common.etcd import MemberStatus
from backhaul_registry.condition import Condition
from tests.fakes.clock import FakeClock

GOOD = MemberStatus("3.5.17", full=False, corrupt=False)
FULL = MemberStatus("3.5.17", full=True, corrupt=False)


class Etcd:
    def __init__(self) -> None:
        self.answer: MemberStatus | None = GOOD

    async def status(self) -> MemberStatus:
        if self.answer is None:
            raise UnavailableError("ETCD_UNAVAILABLE", "away")
        return self.answer


class Told:
    """A condition that is asked, and what came of it."""

    def __init__(self) -> None:
        self.etcd = Etcd()
        self.clock = FakeClock()
        self.full: list[bool] = []
        self.condition = Condition(self.etcd, self.clock, self._note)

    async def _note(self, full: bool) -> None:
        self.full.append(full)

    async def says(self, *answers: MemberStatus | None) -> list[str]:
        """Lets etcd say one thing after the other and returns the events of the log."""
        with capture_logs() as logs:
            for answer in answers:
                self.etcd.answer = answer
                await self.clock.advance(5)
        return [log["event"].partition(":")[0] for log in logs if log["log_level"] != "debug"]


@pytest.fixture
async def told(no_leaks: None) -> AsyncIterator[Told]:
    told = Told()
    task = asyncio.create_task(told.condition.run())
    yield told
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_full_etcd_is_told_once_and_so_is_its_recovery(told: Told) -> None:
    assert await told.says(GOOD, FULL, FULL, None, FULL, GOOD) == ["etcd is full", "etcd has space again"]
    assert told.full == [True, False]


@pytest.mark.parametrize(
    ("version", "warned"), [("3.5.0", 1), ("3.5.1", 1), ("3.5.2", 1), ("3.5.3", 0), ("3.4.23", 0), ("3.6.1", 0)]
)
async def test_a_version_that_can_lose_data_is_warned_of_once(told: Told, version: str, warned: int) -> None:
    status = MemberStatus(version, full=False, corrupt=False)
    events = await told.says(status, None, status)
    assert events.count("etcd version can lose data when it is killed under load") == warned


async def test_members_that_differ_are_told_once(told: Told) -> None:
    corrupt = MemberStatus("3.5.17", full=False, corrupt=True)
    assert await told.says(corrupt, corrupt) == ["etcd says that its members differ"]
