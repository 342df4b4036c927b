"""Turns of which a gateway moves the bytes itself: it is told what to send where, and says how that goes."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration

from backhaul.router.v1 import gateway_pb2 as pb
from backhaul.router.v1 import gateway_pb2_grpc, router_pb2
from backhaul_client.answer import Started, started_from
from backhaul_client.channel import metadata_for, open_channel
from backhaul_client.client import Body, encoded
from backhaul_client.errors import BackhaulError
from backhaul_client.retrying import Retries

if TYPE_CHECKING:
    Stub: TypeAlias = "gateway_pb2_grpc.GatewayServiceAsyncStub"

_PLAN_S = 600.0
_REPORT_S = 5.0


class Cause(Enum):
    """How a decode leg fails."""

    NOT_CONNECTED = pb.ReportTurnRequest.Failed.CAUSE_NOT_CONNECTED
    """There was no connection: nothing was sent."""
    DISCONNECTED = pb.ReportTurnRequest.Failed.CAUSE_DISCONNECTED
    TIMEOUT = pb.ReportTurnRequest.Failed.CAUSE_TIMEOUT


@dataclass(frozen=True, slots=True)
class Leg:
    """What is to be sent."""

    url: str
    """Of a POST, by HTTP/1.1."""
    headers: Mapping[str, str]
    """All of them, but for `host` and `content-length`."""
    body: bytes
    answer_names_hosts: bool
    """Whether `kv_transfer_params` is to be taken out of the answer before a client sees it."""


class Gateway:
    """Plans turns at one router, on its `--listen-gateway` address. Enter it inside the event loop that uses it."""

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._address = address
        self._credentials = credentials
        self._retries = retries or Retries()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._address, self._credentials)
        self._stub: Stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def plan(
        self,
        body: Body,
        *,
        chat: bool = True,
        key: str | None = None,
        session_id: str = "",
        endpoints: Sequence[str] = (),
        timeout_s: float = _PLAN_S,
    ) -> "PlannedTurn":
        """Runs a turn up to its decode leg. ``key`` is the client's; ``endpoints`` limit who may answer.

        Raises BackhaulError. Cancelling ends what runs for it.
        """
        request = pb.PlanTurnRequest(
            api=router_pb2.API_CHAT_COMPLETIONS if chat else router_pb2.API_COMPLETIONS,
            body=encoded(body),
            session_id=session_id,
            endpoints=endpoints,
        )

        async def call(left_s: float) -> pb.PlanTurnResponse:
            return await self._stub.PlanTurn(request, timeout=left_s, metadata=metadata_for(key))

        plan = await self._retries.run(call, timeout_s=timeout_s, idempotent=False)
        return PlannedTurn(plan, self._stub, self._retries, key)


class PlannedTurn:
    """A turn's decode leg, and how it goes. All reports raise BackhaulError.

    Leaving its context before an end was told tells that the client left.
    """

    def __init__(self, plan: pb.PlanTurnResponse, stub: "Stub", retries: Retries, key: str | None) -> None:
        self._stub = stub
        self._retries = retries
        self._key = key
        self._over = False
        self.turn_id = plan.turn_id
        self.started: Started = started_from(plan.started)
        self.leg = Leg(
            url=plan.url,
            headers=dict(plan.headers),
            body=plan.body,
            answer_names_hosts=plan.answer_names_hosts,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._over:
            # A router that does not hear of it gives the turn up by itself.
            with suppress(BackhaulError):
                await self.left()

    async def sending(self) -> None:
        """The leg is about to be sent; it may be from when this has returned on, and must not if it raises."""
        await self._report(sending=pb.ReportTurnRequest.Sending())

    async def first_byte(self, after_s: float) -> None:
        """The first byte of a 200's body is there, seconds after the leg was sent. Again: the answer still comes."""
        after = Duration()
        after.FromNanoseconds(int(after_s * 1e9))
        await self._report(first_byte=pb.ReportTurnRequest.FirstByte(after=after))

    async def done(self) -> None:
        """All of the answer is there."""
        await self._end(done=pb.ReportTurnRequest.Done())

    async def failed(self, cause: Cause) -> None:
        """The leg failed, before the first byte or after it."""
        await self._end(failed=pb.ReportTurnRequest.Failed(cause=cause.value))

    async def refused(self, http_status: int) -> None:
        """The engine answered with another status than 200."""
        cause = pb.ReportTurnRequest.Failed.CAUSE_STATUS
        await self._end(failed=pb.ReportTurnRequest.Failed(cause=cause, http_status=http_status))

    async def left(self) -> None:
        """The client left, and the leg was ended or never sent."""
        await self._end(left=pb.ReportTurnRequest.Left())

    async def _end(self, **step: Any) -> None:
        self._over = True
        await self._report(**step)

    async def _report(self, **step: Any) -> None:
        request = pb.ReportTurnRequest(turn_id=self.turn_id, **step)

        async def call(left_s: float) -> pb.ReportTurnResponse:
            return await self._stub.ReportTurn(request, timeout=left_s, metadata=metadata_for(self._key))

        await self._retries.run(call, timeout_s=_REPORT_S, idempotent=True)
