"""What an agent learns from the server beside it: health, figures, models, handshakes, KV events, hand-offs."""

from random import Random
from typing import Any

import msgspec

from backhaul_common.errors import UnavailableError
from backhaul_connector.clocks import read_clock
from backhaul_node_agent import engine_probe, engine_requests, kv_events
from backhaul_node_agent.core import bounds
from backhaul_node_agent.core.cached import Cached
from backhaul_node_agent.core.progress import Progress, read_figures, request_count
from tests.fuzz.inputs import json_of, lists_of, made_of, msgpack_of, one_of, samples_of
from tests.fuzz.target import Target

_METADATA = {
    "engine_id": "e",
    "agent_metadata": b"\x00\x01",
    "num_blocks": 100,
    "block_size": 16,
    "kv_cache_layout": "HND",
    "block_lens": [1, 2],
}
_PAYLOAD = {"compatibility_hash": "c", "agent_metadata_bytes": msgspec.msgpack.encode(_METADATA)}
_CLOCK = msgspec.msgpack.encode(12.5)


def _handshake(parts: list[bytes]) -> bool:
    try:
        reply = engine_probe._reply(parts)
    except engine_probe.SideChannelError:
        return False
    bounds.check_text(reply.facts.engine_id, "engine_id", required=True)
    assert reply.now is None or abs(reply.now) <= 1e10
    return True


def _clock(parts: list[bytes]) -> bool:
    try:
        payload, clock = parts
        read_clock(payload, clock)
    except ValueError:
        return False
    return True


def _inner(metadata: bytes) -> bytes:
    return msgspec.msgpack.encode({**_PAYLOAD, "agent_metadata_bytes": metadata})


_PAYLOADS = one_of(msgpack_of(_PAYLOAD), made_of(msgpack_of(_METADATA), _inner))
_CLOCKS = samples_of(_CLOCK)


def _parts(chance: Random) -> list[bytes]:
    return [_PAYLOADS(chance), _CLOCKS(chance)]


_PARTS = one_of(_parts, _parts, lists_of(samples_of(_CLOCK, msgspec.msgpack.encode(_PAYLOAD)), most=3))

_STORED = {
    "type": "BlockStored",
    "block_hashes": [b"h" * 32, 7],
    "parent_block_hash": None,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_name": None,
    "medium": "GPU",
    "extra_keys": [["salt"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "backhaul:s:k",
}
_REMOVED = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}
_BATCH: list[Any] = [1.5, [_STORED, _REMOVED, {"type": "AllBlocksCleared"}, {"type": "Else"}], 0]


def _message(batch: bytes) -> list[bytes]:
    return [b"", bytes(8), batch]


def _events(parts: list[bytes]) -> bool:
    cached = Cached(most_blocks=100)
    try:
        sequence, changes = kv_events.read(parts)
    except ValueError:
        return False
    cached.apply(sequence, changes)
    assert len(cached) <= 100
    cached.count(range(64), "salt")
    return True


_METRICS = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:generation_tokens_total{engine="0",model_name="m"} 12
"""


def _figures(data: bytes) -> bool:
    figures = read_figures(data.decode(errors="replace"))
    count = request_count(figures)
    assert count is None or 0 <= count <= bounds.MAX_COUNT
    assert all(0 <= shown.used <= 1 for shown in figures.values())
    Progress(1.0).problem(figures, 0.0)
    return bool(figures)


def _models(data: bytes) -> bool:
    try:
        document = engine_probe.document_in(data)
    except ValueError:
        return False
    return bool(engine_probe._names(document) + engine_probe._names(document, bases=True))


_ANSWER = {
    "id": "x",
    "choices": [],
    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}},
    "kv_transfer_params": {
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_block_ids": [[1, 2]],
        "remote_num_tokens": 9,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_blocks_expiry_time": 5.5,
        "backhaul": {"prompt": 9, "local": 4},
    },
}


def _kept(data: bytes) -> bool:
    try:
        kept = engine_requests._kept(data)
    except UnavailableError:
        return False
    # It becomes a NIXL notification.
    assert ":" not in kept.hand_off_id
    return True


TARGETS = (
    Target(
        "side channel replies",
        ("backhaul_node_agent.engine_probe:_reply", "backhaul_node_agent.engine_probe:_clock"),
        _PARTS,
        _handshake,
    ),
    Target("side channel clocks", ("backhaul_connector.clocks:read_clock",), _PARTS, _clock),
    Target(
        "KV events",
        (
            "backhaul_node_agent.kv_events:_batches",
            "backhaul_node_agent.kv_events:_tags",
            "backhaul_node_agent.kv_events:_events",
        ),
        one_of(
            made_of(msgpack_of(_BATCH), _message),
            made_of(msgpack_of([1.5, [_STORED]], [1.5, [_REMOVED]]), _message),
            lists_of(samples_of(b"", bytes(8), msgspec.msgpack.encode(_BATCH)), most=4),
        ),
        _events,
    ),
    Target("engine figures", ("backhaul_node_agent.core.progress:read_figures",), samples_of(_METRICS, b""), _figures),
    Target(
        "served models",
        ("backhaul_node_agent.engine_probe:document_in",),
        json_of({"data": [{"id": "m", "parent": None}, {"id": "a", "parent": "m"}]}, {"version": "0.32.0"}),
        _models,
    ),
    Target("hand-offs asked for", ("backhaul_node_agent.engine_requests:_kept",), json_of(_ANSWER), _kept),
)
