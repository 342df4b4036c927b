"""What a registry says of its etcd."""

from datetime import UTC, timedelta

import pytest

from backhaul.registry.v1 import diagnosis_pb2 as pb
from backhaul_common.clock import time_of_day
from backhaul_common.durations import seconds
from backhaul_common.errors import AbortedError, UnavailableError
from backhaul_common.etcd import Get, Lease, Listing, MemberStatus
from backhaul_registry.diagnosis_service import DiagnosisService
from tests.fakes.clock import FakeClock


class Etcd:
    """Takes as long as it is told to."""

    endpoint = "10.0.0.1:2379"

    def __init__(self, clock: FakeClock, *, compacted: bool = False) -> None:
        self._clock = clock
        self._compacted = compacted
        self.read_times_s = [0.0, 0.002, 0.9, 0.003]
        self.leases: set[int] = set()

    async def status(self, *, timeout_s: float | None = None) -> MemberStatus:
        return MemberStatus("3.5.17", full=True, corrupt=False, size_bytes=4096, revision=77)

    async def range(self, get: Get, *, revision: int = 0, timeout_s: float | None = None) -> Listing:
        assert timeout_s is not None
        if revision and self._compacted:
            raise AbortedError("ETCD_COMPACTED", "gone")
        await self._clock.advance(self.read_times_s.pop(0))
        return Listing((), 77, more=False)

    async def grant(self, ttl_s: float) -> Lease:
        await self._clock.advance(0.02)
        self.leases.add(len(self.leases) + 1)
        return Lease(len(self.leases), ttl_s)

    async def revoke(self, lease_id: int) -> None:
        await self._clock.advance(5.0)
        self.leases.remove(lease_id)


async def told(*, compacted: bool) -> tuple[pb.EtcdDiagnosis, Etcd]:
    clock = FakeClock()
    etcd = Etcd(clock, compacted=compacted)
    if compacted:
        etcd.read_times_s.pop(0)
    answer = await DiagnosisService(etcd, b"/c/nodes/", clock).Diagnose(pb.DiagnoseRequest(), None)
    return answer.etcd, etcd


async def test_one_slow_read_among_three_does_not_count_and_nothing_is_left_behind() -> None:
    said, etcd = await told(compacted=False)
    assert seconds(said.read_time) == pytest.approx(0.003)
    assert seconds(said.write_time) == pytest.approx(0.02)
    assert etcd.leases == set()


async def test_version_size_revision_and_alarms_are_passed_on() -> None:
    said, _ = await told(compacted=False)
    assert (said.endpoint, said.version, said.size_bytes, said.revision) == ("10.0.0.1:2379", "3.5.17", 4096, 77)
    assert (said.full, said.corrupt) == (True, False)


@pytest.mark.parametrize("compacted", [True, False])
async def test_whether_revisions_are_ever_compacted_shows_at_the_first(compacted: bool) -> None:
    said, _ = await told(compacted=compacted)
    assert said.compacted is compacted


async def test_an_etcd_that_does_not_answer_is_an_error_not_a_fast_one() -> None:
    class Away(Etcd):
        async def grant(self, ttl_s: float) -> Lease:
            raise UnavailableError("ETCD_UNAVAILABLE", "away")

    clock = FakeClock()
    with pytest.raises(UnavailableError):
        await DiagnosisService(Away(clock), b"/c/nodes/", clock).Diagnose(pb.DiagnoseRequest(), None)


async def test_the_time_of_day_is_told_in_utc() -> None:
    clock = FakeClock()
    answer = await DiagnosisService(Etcd(clock), b"/c/nodes/", clock).Diagnose(pb.DiagnoseRequest(), None)
    said = answer.time.ToDatetime(UTC)
    assert abs(said - time_of_day()) < timedelta(minutes=1)
