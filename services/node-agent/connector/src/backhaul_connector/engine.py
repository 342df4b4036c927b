"""Facts about the engine that the connector runs in."""

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backhaul_connector.weights import digest_folder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MIN_LEASE_S = 15.0
"""Shortest ``kv_lease_duration``. A decode engine starts no read in the last five seconds of a hand-off's lease."""
_VLLMS_LEASE_S = 30
"""vLLM's default (``nixl/base_scheduler.py``)."""


def reuse_problem(config: "VllmConfig", agent_socket: str) -> str:
    """Returns why this engine cannot reuse blocks, with the remedy; empty when it can.

    ``kv_load_failure_policy: recompute`` leaves a prefill request with a declined handle waiting for ever, and with
    host buffers vLLM promises tokens that it never reads (``nixl/pull_scheduler.py``, ``update_state_after_alloc``).
    """
    transfer = config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    if not extra.get("bidirectional_kv_xfer", False):
        return 'set "bidirectional_kv_xfer": true in kv_connector_extra_config'
    if transfer.kv_load_failure_policy != "fail":
        return 'set "kv_load_failure_policy": "fail" in --kv-transfer-config'
    if lease_s(config) < MIN_LEASE_S:
        return f'set "kv_lease_duration" to {MIN_LEASE_S:.0f} or more in kv_connector_extra_config (180 is recommended)'
    if not agent_socket:
        return 'set "backhaul_agent_socket" in kv_connector_extra_config or BACKHAUL_AGENT_SOCKET in the environment'
    if _uses_host_buffer(config):
        return 'set "kv_buffer_device" to the engine\'s own device: blocks in host buffers cannot be read back'
    return ""


def lease_s(config: "VllmConfig") -> float:
    """Returns how long a prefill request's blocks are kept for the decode engine, seconds."""
    return float(config.kv_transfer_config.kv_connector_extra_config.get("kv_lease_duration", _VLLMS_LEASE_S))


def whole_prompt_tokens(config: "VllmConfig") -> float:
    """Returns how many tokens a step may compute where a prompt must fit whole; infinity where prompts are cut."""
    scheduler = config.scheduler_config
    if scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold:
        return math.inf
    return scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens


def _uses_host_buffer(config: "VllmConfig") -> bool:
    from vllm.platforms import current_platform

    return current_platform.device_type != "cpu" and config.kv_transfer_config.kv_buffer_device == "cpu"


def trims(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Tells whether a handle may be cut on this engine: one full-attention group, DCP = PP = 1."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    parallel = config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        and parallel.decode_context_parallel_size == parallel.pipeline_parallel_size == 1
    )


def divided_heads(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    """Returns how many KV heads tensor-parallel ranks divide among them; 0 when they do not, or not only heads."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model = config.model_config
    plain = all(isinstance(group.kv_cache_spec, FullAttentionSpec) for group in kv_cache_config.kv_cache_groups)
    return int(model.get_total_num_kv_heads()) if plain and not model.use_mla else 0


def extras_of(request: "Request") -> list[tuple[int, bytes]] | None:
    """Returns position and hash of the request's images and other media; None when its prompt cannot be proved."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return None
    features = request.mm_features or []
    if not all(feature.identifier for feature in features):
        return None
    return [(feature.mm_position.offset, feature.identifier.encode()) for feature in features]


def digest_model(config: "VllmConfig") -> str:
    """Returns the digest of the served model's weights. Blocks: for a thread of its own.

    Raises what `digest_folder` raises, and whatever the hub's cache raises for a model that is not on disk.
    """
    model = config.model_config
    if config.load_config.load_format == "dummy":
        raise ValueError('weights are random ("dummy"): set "backhaul_weights_digest" to share blocks all the same')
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    overrides = {"quantization": str(model.quantization), "hf_overrides": str(model.hf_overrides)}
    return digest_folder(folder, extra=json.dumps(overrides, sort_keys=True))


@contextmanager
def nixl_progress_thread(enabled: bool) -> Iterator[None]:
    """Makes agents that vLLM creates meanwhile run without NIXL's progress thread.

    vLLM has no switch for it (``nixl/base_worker.py`` calls ``nixl_agent_config`` with threads and backends only).
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    original: Any = base_worker.nixl_agent_config
    if enabled or original is None:
        yield
        return
    base_worker.nixl_agent_config = functools.partial(original, enable_prog_thread=False)
    try:
        yield
    finally:
        base_worker.nixl_agent_config = original
