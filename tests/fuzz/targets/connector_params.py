"""kv_transfer_params as an engine's connector finds them in a request."""

from typing import Any

import msgspec

from backhaul_connector.decode import label_of
from backhaul_connector.prefill import Layout, Prompt, judge, proof_of
from tests.fakes.block_sets import IDENTITY, handle, report
from tests.fuzz.inputs import json_of
from tests.fuzz.target import Target

_TOKENS = list(range(200))
_PROMPT = Prompt([*_TOKENS, 9, 9], (), IDENTITY)
_LAYOUT = Layout(block_size=16, trims=True)


def _read(data: bytes) -> dict[str, Any] | None:
    """Returns params as vLLM hands them on: decoded from the request's JSON."""
    try:
        params = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return None
    return params if isinstance(params, dict) else None


def _handle(data: bytes) -> bool:
    params = _read(data)
    if params is None:
        return False
    proof_of(params)
    judged = judge(params, _PROMPT, _LAYOUT, min_verified=16)
    kept = judged.params.get("remote_block_ids")
    if not kept:
        return False
    # Whatever is read, it is no more than was proved equal to this prompt.
    assert 16 <= judged.verified <= len(_TOKENS)
    assert judged.params["remote_num_tokens"] == judged.verified
    return True


def _label(data: bytes) -> bool:
    params = _read(data)
    label = None if params is None else label_of(params)
    return bool(label and label.keys)


TARGETS = (
    Target(
        "handles at a prefill engine",
        ("backhaul_connector.prefill:proof_of", "backhaul_connector.prefill:_handle_of"),
        json_of(msgspec.json.decode(msgspec.json.encode(handle(report())))),
        _handle,
    ),
    Target(
        "labels at a decode engine",
        ("backhaul_connector.decode:label_of",),
        json_of(
            {
                "do_remote_prefill": True,
                "backhaul": {"scope": "s", "keys": ["a", "b"], "continues": ["c"], "traceparent": "t"},
            }
        ),
        _label,
    ),
)
