"""Messages of the registry's API, sound unless told otherwise."""

from typing import Any

from google.protobuf.duration_pb2 import Duration

from backhaul.registry.v1 import registry_pb2 as pb


def node(node_id: str = "d1", session: str = "s1", **fields: Any) -> pb.Node:
    """Returns a decode node that is ready."""
    engine = pb.Engine(engine_id=f"{node_id}-e1", block_size=16, block_count=100, retention_ttl=Duration(seconds=30))
    values: dict[str, Any] = {
        "role": pb.ROLE_DECODE,
        "agent_address": "127.0.0.1:7201",
        "engine_url": "http://127.0.0.1:8200",
        "models": ["m"],
        "engines": [engine],
        "state": pb.NODE_STATE_READY,
    }
    return pb.Node(node_id=node_id, session=session, **{**values, **fields})


def pointer(set_id: str = "set-1", key: str = "k1", scope: str = "scope", **fields: Any) -> pb.BlockSetPointer:
    """Returns a pointer of engine ``e1`` on node ``d1``."""
    values: dict[str, Any] = {
        "engine_id": "e1",
        "node_id": "d1",
        "token_count": 640,
        "digest": bytes(16),
        "stride": 64,
        "identity": bytes(range(16)),
    }
    return pb.BlockSetPointer(scope=scope, key=key, set_id=set_id, **{**values, **fields})
