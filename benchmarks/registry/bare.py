"""What the services are measured against: gRPC handlers that do the same to etcd, and nothing else.

They check nothing, convert nothing, trace nothing and limit nothing. Answers are as large as the services' own.
"""

import argparse
import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.etcd.stubs import rpc
from backhaul_registry import convert
from backhaul_registry.core.ledger import chunks
from backhaul_registry.core.rules import MAX_POINTERS_PER_KEY
from backhaul_registry.keys import Keys
from backhaul_registry.records import Records
from benchmarks.registry.pointers import CLUSTER, pointer_of

_TTL_S = 30
_HANDLE_BYTES = 2_048
"""About what `ClaimBlockSet` answers for a set of 4,096 tokens."""


class BareIndex:
    """Finds and publishes."""

    def __init__(self, etcd: grpc.aio.Channel) -> None:
        self._kv = rpc.KVStub(etcd)
        self._leases = rpc.LeaseStub(etcd)
        self._index = f"/{CLUSTER}/index/"
        sample = pointer_of(0)
        self._value = Records(Keys(CLUSTER)).write_pointer(sample)
        self._found = pb.FindBlockSetsResponse(pointers=[convert.pointer_to_proto(sample)])

    async def FindBlockSets(self, request: pb.FindBlockSetsRequest, context: Any) -> pb.FindBlockSetsResponse:
        """Reads the keys in one transaction."""
        await self._kv.Txn(rpc.TxnRequest(success=[self._range(request.scope, key) for key in request.keys]))
        return self._found

    async def PublishBlockSets(
        self, request_iterator: AsyncIterator[pb.PublishBlockSetsRequest], context: Any
    ) -> AsyncIterator[pb.PublishBlockSetsResponse]:
        """Writes each batch in transactions of as many keys as the registry's, behind a mark like its."""
        await anext(request_iterator)
        lease = (await self._leases.LeaseGrant(rpc.LeaseGrantRequest(TTL=_TTL_S))).ID
        yield pb.PublishBlockSetsResponse(opened=pb.PublishBlockSetsResponse.Opened())
        mark, revision = f"/{CLUSTER}/streams/{uuid.uuid4().hex}".encode(), 0
        async for request in request_iterator:
            for part in chunks(request.batch.upserts):
                puts = [self._put(pointer, lease) for pointer in part]
                txn = rpc.TxnRequest(compare=[_unchanged(mark, revision)], success=[_put(mark, b"1", lease), *puts])
                revision = (await self._kv.Txn(txn)).header.revision
            acknowledged = pb.PublishBlockSetsResponse.Acknowledged(nonce=request.batch.nonce)
            yield pb.PublishBlockSetsResponse(acknowledged=acknowledged)
        await self._leases.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease))

    def _range(self, scope: str, key: str) -> Any:
        prefix = f"{self._index}{scope}/{key}"
        request = rpc.RangeRequest(
            key=f"{prefix}/".encode(),
            range_end=f"{prefix}0".encode(),
            limit=MAX_POINTERS_PER_KEY,
            sort_order=rpc.RangeRequest.DESCEND,
            sort_target=rpc.RangeRequest.CREATE,
        )
        return rpc.RequestOp(request_range=request)

    def _put(self, pointer: pb.BlockSetPointer, lease: int) -> Any:
        return _put(f"{self._index}{pointer.scope}/{pointer.key}/{pointer.set_id}".encode(), self._value, lease)


class BareOwner:
    """Grants without looking."""

    def __init__(self) -> None:
        self._granted = agent_pb2.ClaimBlockSetResponse(kv_transfer_params_json="x" * _HANDLE_BYTES, token_count=4096)

    async def ClaimBlockSet(
        self, request: agent_pb2.ClaimBlockSetRequest, context: Any
    ) -> agent_pb2.ClaimBlockSetResponse:
        """Answers."""
        return self._granted

    async def ReturnBlockSet(
        self, request: agent_pb2.ReturnBlockSetRequest, context: Any
    ) -> agent_pb2.ReturnBlockSetResponse:
        """Answers."""
        return agent_pb2.ReturnBlockSetResponse()


def _put(key: bytes, value: bytes, lease: int) -> Any:
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def _unchanged(key: bytes, revision: int) -> Any:
    return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision)


def handlers(etcd: grpc.aio.Channel) -> Sequence[grpc.GenericRpcHandler]:
    """Returns what answers under the names of the services."""
    index, owner = BareIndex(etcd), BareOwner()
    find = grpc.unary_unary_rpc_method_handler(
        index.FindBlockSets, pb.FindBlockSetsRequest.FromString, pb.FindBlockSetsResponse.SerializeToString
    )
    publish = grpc.stream_stream_rpc_method_handler(
        index.PublishBlockSets, pb.PublishBlockSetsRequest.FromString, pb.PublishBlockSetsResponse.SerializeToString
    )
    claim = grpc.unary_unary_rpc_method_handler(
        owner.ClaimBlockSet,
        agent_pb2.ClaimBlockSetRequest.FromString,
        agent_pb2.ClaimBlockSetResponse.SerializeToString,
    )
    give_back = grpc.unary_unary_rpc_method_handler(
        owner.ReturnBlockSet,
        agent_pb2.ReturnBlockSetRequest.FromString,
        agent_pb2.ReturnBlockSetResponse.SerializeToString,
    )
    return (
        grpc.method_handlers_generic_handler(
            "backhaul.registry.v1.IndexService", {"FindBlockSets": find, "PublishBlockSets": publish}
        ),
        grpc.method_handlers_generic_handler(
            "backhaul.agent.v1.BlockSetService", {"ClaimBlockSet": claim, "ReturnBlockSet": give_back}
        ),
    )


async def _serve(address: str, endpoint: str) -> None:
    async with grpc.aio.insecure_channel(endpoint, options=[("grpc.enable_http_proxy", 0)]) as etcd:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(handlers(etcd))
        server.add_insecure_port(address)
        await server.start()
        await server.wait_for_termination()


def main() -> int:
    """Serves until ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.registry.bare", description=__doc__)
    parser.add_argument("--listen", required=True, help="host:port")
    parser.add_argument("--etcd", required=True, help="host:port")
    options = parser.parse_args()
    asyncio.run(_serve(options.listen, options.etcd))
    return 0


if __name__ == "__main__":
    sys.exit(main())
