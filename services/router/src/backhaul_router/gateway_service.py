"""The gRPC face towards gateways that move the bytes of turns themselves."""

from dataclasses import replace

from backhaul.router.v1 import gateway_pb2 as pb
from backhaul.router.v1 import gateway_pb2_grpc
from backhaul_common.durations import duration, seconds
from backhaul_common.errors import InvalidArgumentError
from backhaul_router.core.engines import Failure, failure_in
from backhaul_router.core.plans import Step
from backhaul_router.forwarding import Forwarded
from backhaul_router.grpc_requests import Context, GrpcRequests, as_statuses, endpoint_of, left_s, started_to
from backhaul_router.planned_turns import PlannedTurns, Report
from backhaul_router.turns import Turns

SERVICE_NAME = "backhaul.router.v1.GatewayService"

_FAILURES = {
    pb.ReportTurnRequest.Failed.CAUSE_NOT_CONNECTED: Failure.REFUSED,
    pb.ReportTurnRequest.Failed.CAUSE_DISCONNECTED: Failure.DISCONNECTED,
    pb.ReportTurnRequest.Failed.CAUSE_TIMEOUT: Failure.TIMEOUT,
}


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    """Plans turns, and is told how they go."""

    def __init__(self, *, turns: Turns, planned: PlannedTurns, body_limit_bytes: int) -> None:
        self._planned = planned
        self._requests = GrpcRequests(turns, body_limit_bytes=body_limit_bytes)

    async def PlanTurn(self, request: pb.PlanTurnRequest, context: Context) -> pb.PlanTurnResponse:
        """Runs a turn up to its decode leg."""
        turn = self._requests.turn(endpoint_of(request.api), request.body, request.session_id, context)
        turn = replace(turn, endpoints=frozenset(request.endpoints) or None)
        with as_statuses():
            turn_id, forwarded = await self._planned.plan(turn, left_s=left_s(context))
        return _plan_to(turn_id, forwarded, self._planned.send_s)

    async def ReportTurn(self, request: pb.ReportTurnRequest, context: Context) -> pb.ReportTurnResponse:
        """Takes a report."""
        report = _report_in(request)
        over = await self._planned.report(request.turn_id, self._requests.tenant(context), report)
        return pb.ReportTurnResponse(report_within=None if over else duration(self._planned.report_s))


def _plan_to(turn_id: str, forwarded: Forwarded, send_s: float) -> pb.PlanTurnResponse:
    leg = forwarded.leg
    return pb.PlanTurnResponse(
        turn_id=turn_id,
        url=forwarded.url,
        endpoint=forwarded.endpoint,
        headers={**leg.headers, "content-type": "application/json"},
        body=leg.body,
        started=started_to(forwarded.served),
        answer_names_hosts=forwarded.names_hosts,
        send_within=duration(send_s),
    )


def _report_in(request: pb.ReportTurnRequest) -> Report:
    """Raises InvalidArgumentError (STEP)."""
    name = request.WhichOneof("step")
    if name is None:
        raise InvalidArgumentError("STEP", "step must say how the turn goes")
    step = Step(name)
    if step is Step.FIRST_BYTE:
        return Report(step, after_s=max(0.0, seconds(request.first_byte.after)))
    return _failed_in(request.failed) if step is Step.FAILED else Report(step)


def _failed_in(failed: pb.ReportTurnRequest.Failed) -> Report:
    if failed.cause in _FAILURES:
        return Report(Step.FAILED, failure=_FAILURES[failed.cause])
    if failed.cause != pb.ReportTurnRequest.Failed.CAUSE_STATUS:
        raise InvalidArgumentError("STEP", "failed.cause must say how the leg failed")
    if not 300 <= failed.http_status < 600:
        raise InvalidArgumentError("STEP", "failed.http_status must be the engine's, from 300 to 599")
    return Report(Step.FAILED, failure=failure_in(failed.http_status), status=failed.http_status)
