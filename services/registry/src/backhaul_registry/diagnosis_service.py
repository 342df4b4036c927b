"""gRPC face by which operators learn how etcd is, as this replica sees it."""

import statistics
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from google.protobuf.timestamp_pb2 import Timestamp

from backhaul.registry.v1 import diagnosis_pb2 as pb
from backhaul.registry.v1.diagnosis_pb2_grpc import DiagnosisServiceServicer
from backhaul_common.clock import Clock, time_of_day
from backhaul_common.durations import duration
from backhaul_common.errors import AbortedError
from backhaul_common.etcd import Get, Lease, Listing, MemberStatus

SERVICE_NAME = "backhaul.registry.v1.DiagnosisService"

_SAMPLES = 3
"""Reads and writes that are measured: one alone may meet an election or a slow disk flush."""
_CALL_S = 2.0
_LEASE_TTL_S = 5.0


class Described(Protocol):
    """The part of an etcd client that is used."""

    @property
    def endpoint(self) -> str: ...

    async def status(self, *, timeout_s: float | None = None) -> MemberStatus: ...

    async def range(self, get: Get, *, revision: int = 0, timeout_s: float | None = None) -> Listing: ...

    async def grant(self, ttl_s: float) -> Lease: ...

    async def revoke(self, lease_id: int) -> None: ...


class DiagnosisService(DiagnosisServiceServicer):
    """Asks etcd whenever it is asked."""

    def __init__(self, etcd: Described, key: bytes, clock: Clock) -> None:
        """``key`` is one that may be read; it need not exist."""
        self._etcd = etcd
        self._probe = Get(key, limit=1)
        self._clock = clock

    async def Diagnose(self, request: pb.DiagnoseRequest, context: Any) -> pb.DiagnoseResponse:
        """Says how etcd is. Raises BackhaulError when it does not answer."""
        status = await self._etcd.status(timeout_s=_CALL_S)
        etcd = pb.EtcdDiagnosis(
            endpoint=self._etcd.endpoint,
            version=status.version,
            size_bytes=status.size_bytes,
            revision=status.revision,
            compacted=await self._compacted(),
            full=status.full,
            corrupt=status.corrupt,
            read_time=duration(await _middle_s(self._read_s)),
            write_time=duration(await _middle_s(self._write_s)),
        )
        now = Timestamp()
        now.FromDatetime(time_of_day())
        return pb.DiagnoseResponse(time=now, etcd=etcd)

    async def _compacted(self) -> bool:
        try:
            await self._etcd.range(self._probe, revision=1, timeout_s=_CALL_S)
        except AbortedError:
            return True
        return False

    async def _read_s(self) -> float:
        began = self._clock.monotonic()
        await self._etcd.range(self._probe, timeout_s=_CALL_S)
        return self._clock.monotonic() - began

    async def _write_s(self) -> float:
        """Grants a lease, which members agree upon and flush to disk like any write, and ends it."""
        began = self._clock.monotonic()
        lease = await self._etcd.grant(_LEASE_TTL_S)
        took_s = self._clock.monotonic() - began
        await self._etcd.revoke(lease.lease_id)
        return took_s


async def _middle_s(measure: Callable[[], Awaitable[float]]) -> float:
    return statistics.median([await measure() for _ in range(_SAMPLES)])
