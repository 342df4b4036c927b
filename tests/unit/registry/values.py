"""Values of the registry's core, sound unless told otherwise."""

from typing import Any

from backhaul_registry.core.model import Engine, Node, NodeState, Pointer, Role


def node(session: str = "s1", **fields: Any) -> Node:
    """Returns a decode node that is ready."""
    values: dict[str, Any] = {
        "node_id": "d1",
        "role": Role.DECODE,
        "agent_address": "h:1",
        "engine_url": "http://h:2",
        "models": ("m",),
        "engines": (Engine(engine_id="e1", block_size=16),),
        "state": NodeState.READY,
    }
    return Node(session=session, **{**values, **fields})


def pointer(set_id: str = "set-1", **fields: Any) -> Pointer:
    """Returns a pointer of engine ``e1`` on node ``d1``."""
    values: dict[str, Any] = {
        "scope": "s",
        "key": "k",
        "engine_id": "e1",
        "node_id": "d1",
        "token_count": 64,
        "digest": bytes(16),
        "stride": 64,
        "identity": bytes(16),
    }
    return Pointer(set_id=set_id, **{**values, **fields})
