"""`HarvestBlockSet` over real gRPC: what is refused before an engine is asked. What follows: `tests/e2e/harvest`."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from backhaul.agent.v1 import agent_pb2
from backhaul_common.grpc_client import to_error
from tests.contract.owner_node import OwnerNode, owner_node


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[OwnerNode]:
    async with owner_node(tmp_path, drain_s=0.2) as running:
        yield running


async def refusal(node: OwnerNode, **fields: Any) -> str:
    request = agent_pb2.HarvestBlockSetRequest(**{"engine_id": "engine-1", "token_ids": [1, 2], **fields})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.stub.HarvestBlockSet(request, timeout=5)
    return to_error(caught.value).reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "NO_EVENTS"),
        ({"token_ids": []}, "TOKEN_IDS"),
        ({"token_ids": [1, -1]}, "TOKEN_IDS"),
        ({"set_id": "x" * 257}, "TEXT"),
        ({"model": "x" * 1025}, "TEXT"),
    ],
    ids=["no-events", "no-tokens", "a-token-below-zero", "a-long-name", "a-long-model"],
)
async def test_a_request_that_cannot_be_met_is_refused(node: OwnerNode, fields: dict[str, Any], reason: str) -> None:
    assert await refusal(node, **fields) == reason
