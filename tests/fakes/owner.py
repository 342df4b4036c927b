"""An owner of block sets over real gRPC: grants each set once."""

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from backhaul.agent.v1 import agent_pb2, agent_pb2_grpc
from backhaul_common.addresses import join_address
from backhaul_common.errors import BackhaulError, FailedPreconditionError, NotFoundError
from backhaul_common.grpc_server import GrpcServer
from backhaul_common.tls import Identity
from tests.fakes.partial import Partial


class FakeOwner(Partial):
    """The agent beside one decode engine; an async context manager."""

    def __init__(self, host: str = "127.0.0.1", *, tls: Identity | None = None) -> None:
        self.claims: list[agent_pb2.ClaimBlockSetRequest] = []
        self.returned: list[str] = []
        self.released: list[tuple[str, str]] = []
        """Engine and id of hand-offs that were to be freed."""
        self.released_sets: list[str] = []
        self.fenced: dict[tuple[str, str], list[str]] = {}
        """By scope and key: block sets that were found after a restart."""
        self.releases = 0
        """Calls that were to release block sets."""
        self.refusal: BackhaulError | None = None
        """Answer to every claim and release of block sets, when set."""
        self.silent = False
        """Whether claims, harvests and releases of block sets are never answered."""
        self.harvests: list[agent_pb2.HarvestBlockSetRequest] = []
        self.harvests_left = 0
        """Callers of a harvest that left before they were answered."""
        self.cached_count = 0
        """Tokens of any prompt that the engine still caches."""
        self.port = 0
        self._host = host
        self._tls = tls
        self._sets: dict[str, tuple[Mapping[str, Any], str]] = {}
        self._claimed: dict[str, str] = {}
        self._server: GrpcServer | None = None

    async def __aenter__(self) -> Self:
        names = ("backhaul.agent.v1.BlockSetService",)
        self._server = GrpcServer(address=join_address(self._host, 0), service_names=names, tls=self._tls)
        servicer: Any = self
        agent_pb2_grpc.add_BlockSetServiceServicer_to_server(servicer, self._server.server)
        await self._server.__aenter__()
        self.port = self._server.port
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.__aexit__(exc_type, exc, traceback)

    @property
    def address(self) -> str:
        """host:port."""
        return join_address(self._host, self.port)

    def hold(self, set_id: str, *, engine_id: str, token_count: int, scope: str = "") -> None:
        """Holds a block set; an empty scope accepts any."""
        self._sets[set_id] = (_handle(set_id, engine_id, token_count, scope), engine_id)

    async def ClaimBlockSet(
        self, request: agent_pb2.ClaimBlockSetRequest, context: Any
    ) -> agent_pb2.ClaimBlockSetResponse:
        """Grants once, idempotent by request id."""
        self.claims.append(request)
        if self.silent:
            await asyncio.Event().wait()
        if self.refusal is not None:
            raise self.refusal
        handle, engine_id = self._sets.get(request.set_id, ({}, ""))
        if not handle or engine_id != request.engine_id:
            raise NotFoundError("SET_UNKNOWN", "no such block set")
        if self._claimed.setdefault(request.set_id, request.request_id) != request.request_id:
            raise FailedPreconditionError("SET_CLAIMED", "claimed by another")
        return agent_pb2.ClaimBlockSetResponse(
            kv_transfer_params_json=json.dumps(handle), token_count=handle["remote_num_tokens"]
        )

    async def HarvestBlockSet(
        self, request: agent_pb2.HarvestBlockSetRequest, context: Any
    ) -> agent_pb2.HarvestBlockSetResponse:
        """Makes a handle for what is cached."""
        self.harvests.append(request)
        if self.silent:
            try:
                await asyncio.Event().wait()
            finally:
                self.harvests_left += 1
        if self.refusal is not None:
            raise self.refusal
        if not self.cached_count:
            raise NotFoundError("NOT_CACHED", "evicted")
        name = f"fresh-{len(self.harvests)}"
        handle = _handle(name, request.engine_id, self.cached_count, request.scope)
        return agent_pb2.HarvestBlockSetResponse(
            kv_transfer_params_json=json.dumps(handle), token_count=self.cached_count, hand_off_id=name
        )

    async def ReturnBlockSet(
        self, request: agent_pb2.ReturnBlockSetRequest, context: Any
    ) -> agent_pb2.ReturnBlockSetResponse:
        """Takes a claim back."""
        self.returned.append(request.request_id)
        self._claimed = {set_id: claim for set_id, claim in self._claimed.items() if claim != request.request_id}
        return agent_pb2.ReturnBlockSetResponse()

    async def ReleaseBlockSets(
        self, request: agent_pb2.ReleaseBlockSetsRequest, context: Any
    ) -> agent_pb2.ReleaseBlockSetsResponse:
        """Releases what is not claimed."""
        self.releases += 1
        if self.silent:
            await asyncio.Event().wait()
        if self.refusal is not None:
            raise self.refusal
        behind = [set_id for key in request.keys for set_id in self.fenced.get((request.scope, key), ())]
        outcome = agent_pb2.ReleaseBlockSetsResponse(deferred=behind)
        for set_id in request.set_ids:
            if set_id in self._claimed:
                outcome.deferred.append(set_id)
            else:
                (outcome.released if self._sets.pop(set_id, None) else outcome.unknown).append(set_id)
        self.released_sets += outcome.released
        return outcome

    async def ReleaseHandOff(
        self, request: agent_pb2.ReleaseHandOffRequest, context: Any
    ) -> agent_pb2.ReleaseHandOffResponse:
        """Takes note."""
        self.released.append((request.engine_id, request.hand_off_id))
        return agent_pb2.ReleaseHandOffResponse()


def _handle(name: str, engine_id: str, token_count: int, scope: str) -> dict[str, Any]:
    """Returns kv_transfer_params for a prefill leg."""
    proof = {
        "scope": scope,
        "identity": "00" * 16,
        "stride": 64,
        "spacing": 64,
        "token_count": token_count,
        "anchors": "00" * 16,
    }
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": engine_id,
        "remote_block_ids": [[7, 8]],
        "remote_request_id": name,
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "remote_num_tokens": token_count,
        "remote_blocks_expiry_time": 123.5,
        "backhaul": proof,
    }
