"""gRPC face of the agent: `BlockSetService`."""

import base64
import binascii

import grpc
import structlog
from opentelemetry import trace

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_common import attributes
from backhaul_common.durations import seconds
from backhaul_common.errors import BackhaulError, InvalidArgumentError
from backhaul_node_agent import convert
from backhaul_node_agent.agent import Agent
from backhaul_node_agent.config import MAX_DRAIN_S
from backhaul_node_agent.core import bounds
from backhaul_node_agent.drain import Drain
from backhaul_node_agent.harvest import Harvest

_log = structlog.get_logger(__name__)

SERVICE_NAME = agent_pb2.DESCRIPTOR.services_by_name["BlockSetService"].full_name

_MAX_REQUEST_ID_BYTES = 128
_MAX_IDS = 1_000
_MAX_KEYS = 16
_MAX_TOKENS = 4_000_000
_MOST_HARVEST_S = 2.0
"""For a caller that sets no deadline."""
_DEFAULT_PAGE, _MAX_PAGE = 500, 5_000


class BlockSetServicer(agent_pb2_grpc.BlockSetServiceServicer):
    """Converts, calls the agent, converts."""

    def __init__(self, agent: Agent, harvest: Harvest, drain: Drain, *, drain_timeout_s: float) -> None:
        """`drain_timeout_s` bounds drains that are asked for without a timeout."""
        self._agent = agent
        self._harvest = harvest
        self._drain = drain
        self._drain_timeout_s = drain_timeout_s

    async def ClaimBlockSet(
        self,
        request: agent_pb2.ClaimBlockSetRequest,
        context: grpc.aio.ServicerContext[agent_pb2.ClaimBlockSetRequest, agent_pb2.ClaimBlockSetResponse],
    ) -> agent_pb2.ClaimBlockSetResponse:
        _check_request_id(request.request_id)
        span = trace.get_current_span()
        span.set_attributes({attributes.SET_ID: request.set_id[:256], attributes.ENGINE_ID: request.engine_id[:256]})
        try:
            grant = await self._agent.claim(convert.claim_request(request))
        except BackhaulError as error:
            span.set_attribute(attributes.MISS_REASON, error.reason)
            _log.info("claim refused", set_id=request.set_id[:256], reason=error.reason)
            raise
        _log.info("claim granted", set_id=request.set_id, ttl_s=round(grant.ttl_s, 3))
        return convert.claim_response(grant)

    async def ReturnBlockSet(
        self,
        request: agent_pb2.ReturnBlockSetRequest,
        context: grpc.aio.ServicerContext[agent_pb2.ReturnBlockSetRequest, agent_pb2.ReturnBlockSetResponse],
    ) -> agent_pb2.ReturnBlockSetResponse:
        _check_request_id(request.request_id)
        self._agent.give_back(request.request_id)
        return agent_pb2.ReturnBlockSetResponse()

    async def ReleaseBlockSets(
        self,
        request: agent_pb2.ReleaseBlockSetsRequest,
        context: grpc.aio.ServicerContext[agent_pb2.ReleaseBlockSetsRequest, agent_pb2.ReleaseBlockSetsResponse],
    ) -> agent_pb2.ReleaseBlockSetsResponse:
        _check_keys(request)
        ids = dict.fromkeys(request.set_ids)
        dropped = [set_id for set_id in ids if self._harvest.drop(set_id)]
        kept = [set_id for set_id in ids if set_id not in dropped]
        outcome = self._agent.release(kept, scope=request.scope, keys=request.keys)
        return agent_pb2.ReleaseBlockSetsResponse(
            released=[*dropped, *outcome.released], deferred=outcome.deferred, unknown=outcome.unknown
        )

    async def ReleaseHandOff(
        self,
        request: agent_pb2.ReleaseHandOffRequest,
        context: grpc.aio.ServicerContext[agent_pb2.ReleaseHandOffRequest, agent_pb2.ReleaseHandOffResponse],
    ) -> agent_pb2.ReleaseHandOffResponse:
        _check_hand_off_id(request.hand_off_id)
        if self._harvest.release(request.engine_id, request.hand_off_id):
            return agent_pb2.ReleaseHandOffResponse()
        self._agent.release_hand_off(request.engine_id, request.hand_off_id)
        return agent_pb2.ReleaseHandOffResponse()

    async def RenewBlockSets(
        self,
        request: agent_pb2.RenewBlockSetsRequest,
        context: grpc.aio.ServicerContext[agent_pb2.RenewBlockSetsRequest, agent_pb2.RenewBlockSetsResponse],
    ) -> agent_pb2.RenewBlockSetsResponse:
        _check_ids(len(request.set_ids))
        renewed, unknown = self._agent.renew(list(dict.fromkeys(request.set_ids)))
        return agent_pb2.RenewBlockSetsResponse(renewed=renewed, unknown=unknown)

    async def HarvestBlockSet(
        self,
        request: agent_pb2.HarvestBlockSetRequest,
        context: grpc.aio.ServicerContext[agent_pb2.HarvestBlockSetRequest, agent_pb2.HarvestBlockSetResponse],
    ) -> agent_pb2.HarvestBlockSetResponse:
        _check_tokens(request)
        span = trace.get_current_span()
        span.set_attributes({attributes.SET_ID: request.set_id[:256], attributes.ENGINE_ID: request.engine_id[:256]})
        left_s = context.time_remaining()
        try:
            harvested = await self._harvest.harvest(
                convert.harvest_request(request), _MOST_HARVEST_S if left_s is None else left_s
            )
        except BackhaulError as error:
            span.set_attribute(attributes.MISS_REASON, error.reason)
            _log.info("no second chance", set_id=request.set_id[:256], reason=error.reason)
            raise
        _log.info("second chance", set_id=request.set_id[:256], tokens=harvested.grant.block_set.token_count)
        return convert.harvest_response(harvested)

    async def ListBlockSets(
        self,
        request: agent_pb2.ListBlockSetsRequest,
        context: grpc.aio.ServicerContext[agent_pb2.ListBlockSetsRequest, agent_pb2.ListBlockSetsResponse],
    ) -> agent_pb2.ListBlockSetsResponse:
        if not 0 <= request.page_size <= _MAX_PAGE:
            raise InvalidArgumentError("PAGE_SIZE", f"page_size must be 0 to {_MAX_PAGE}")
        if len(request.set_ids) > _MAX_IDS:
            raise InvalidArgumentError("SET_IDS", f"at most {_MAX_IDS} set_ids are accepted")
        wanted = frozenset(request.set_ids)
        size = request.page_size or _DEFAULT_PAGE
        after = _decode_token(request.page_token)
        sets = (held for held in self._agent.sets() if not wanted or held.name.set_id in wanted)
        rest = [held for held in sets if (held.name.set_id, held.name.engine_id) > after]
        page = rest[:size]
        last = page[-1].name if len(rest) > size else None
        return agent_pb2.ListBlockSetsResponse(
            block_sets=map(convert.listed, page),
            next_page_token=_encode_token(last.set_id, last.engine_id) if last else "",
        )

    async def Drain(
        self,
        request: agent_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[agent_pb2.DrainRequest, agent_pb2.DrainResponse],
    ) -> agent_pb2.DrainResponse:
        within_s = _drain_timeout_s(request) if request.HasField("timeout") else self._drain_timeout_s
        return convert.drain_response(self._drain.ask(within_s, retiring=True))


def _drain_timeout_s(request: agent_pb2.DrainRequest) -> float:
    within_s = seconds(request.timeout)
    if not 0 <= within_s <= MAX_DRAIN_S:
        raise InvalidArgumentError("TIMEOUT", f"timeout must be 0 to {MAX_DRAIN_S:g} s")
    return within_s


def _check_request_id(request_id: str) -> None:
    if not 0 < len(request_id.encode()) <= _MAX_REQUEST_ID_BYTES:
        raise InvalidArgumentError("REQUEST_ID", f"request_id must have 1 to {_MAX_REQUEST_ID_BYTES} bytes")


def _check_hand_off_id(hand_off_id: str) -> None:
    try:
        bounds.check_request_id(hand_off_id, "hand_off_id", most_bytes=bounds.MAX_HAND_OFF_ID_BYTES)
    except bounds.OutOfBoundsError as error:
        raise InvalidArgumentError("HAND_OFF_ID", str(error)) from None


def _check_keys(request: agent_pb2.ReleaseBlockSetsRequest) -> None:
    if len(request.keys) > _MAX_KEYS:
        raise InvalidArgumentError("KEYS", f"at most {_MAX_KEYS} keys are accepted")
    if not request.keys:
        _check_ids(len(request.set_ids))
    elif len(request.set_ids) > _MAX_IDS:
        raise InvalidArgumentError("SET_IDS", f"at most {_MAX_IDS} set_ids are accepted")


def _check_tokens(request: agent_pb2.HarvestBlockSetRequest) -> None:
    if not 0 < len(request.token_ids) <= _MAX_TOKENS or min(request.token_ids) < 0:
        raise InvalidArgumentError("TOKEN_IDS", f"1 to {_MAX_TOKENS} token_ids are accepted, none of them negative")
    for field, most in (("set_id", 256), ("scope", 128), ("model", 1024), ("cache_salt", 1024)):
        if len(getattr(request, field).encode()) > most:
            raise InvalidArgumentError("TEXT", f"{field} must have at most {most} bytes")


def _check_ids(count: int) -> None:
    if not 0 < count <= _MAX_IDS:
        raise InvalidArgumentError("SET_IDS", f"1 to {_MAX_IDS} set_ids are accepted")


def _encode_token(set_id: str, engine_id: str) -> str:
    return base64.urlsafe_b64encode(f"{set_id}\0{engine_id}".encode()).decode()


def _decode_token(token: str) -> tuple[str, str]:
    try:
        set_id, _, engine_id = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode().partition("\0")
    except (binascii.Error, UnicodeError):
        raise InvalidArgumentError("PAGE_TOKEN", "page_token is not one of this service's") from None
    return set_id, engine_id
