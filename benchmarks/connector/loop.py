"""vLLM's own scheduler with a connector, and a model that computes nothing. Runs in the engine environment."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.connector.clocked import HookClock, HookTimes

BLOCK_SIZE = 16
"""vLLM's default on GPUs."""
_BLOCK_COUNT = 120_000
_MAX_MODEL_LEN = 200_000
_TOKEN = 7
"""What the model says."""


@dataclass(slots=True)
class Step:
    """What one iteration of the loop took in the hooks."""

    hooks: HookTimes
    scheduled: int
    """Tokens that the model would have computed."""
    finished: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """Requests that ended, and the ``kv_transfer_params`` of their answers."""


class SchedulerLoop:
    """The loop of an engine core without a model: ``add`` requests, then ``step``."""

    def __init__(self, model: Path, transfer: Mapping[str, Any]) -> None:
        """``model`` is read for its configuration only; ``transfer`` is the value of --kv-transfer-config."""
        os.environ |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "HF_HUB_OFFLINE": "1"}
        config = EngineArgs(
            model=str(model),
            kv_transfer_config=dict(transfer),
            block_size=BLOCK_SIZE,
            max_model_len=_MAX_MODEL_LEN,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="uni",
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = _BLOCK_COUNT
        attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(_BLOCK_COUNT, [], [KVCacheGroupSpec(["layer"], attention)])
        self._scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self.connector = self._scheduler.connector
        self._clock = HookClock(self.connector)

    def request(self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any], max_tokens: int) -> Any:
        """Makes a request, as vLLM does in a thread of its own."""
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": dict(params)}
        )
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def add(self, request: Any) -> None:
        """Takes a request in; what its hook takes counts to the next step."""
        self._scheduler.add_request(request)

    def step(self, *, received: Iterable[str] = (), sent: Iterable[str] = ()) -> Step:
        """Plans and ends a step, with which blocks were ``received`` or ``sent``, by request id."""
        plan = self._scheduler.schedule()
        ids = list(plan.num_scheduled_tokens)
        transfers = KVConnectorOutput(finished_sending=set(sent), finished_recving=set(received))
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[self._sampled(request_id) for request_id in ids],
            kv_connector_output=transfers,
        )
        outputs = self._scheduler.update_from_output(plan, answer)
        finished = {
            output.request_id: output.kv_transfer_params
            for core in outputs.values()
            for output in core.outputs
            if output.finish_reason is not None
        }
        return Step(self._clock.take(), plan.total_num_scheduled_tokens, finished)

    def reads(self, request_id: str) -> bool:
        """Tells whether a request waits for blocks of another engine."""
        return bool(self._scheduler.requests[request_id].status.name == "WAITING_FOR_REMOTE_KVS")

    def close(self) -> None:
        """Ends the connector's threads."""
        self._scheduler.shutdown()

    def _sampled(self, request_id: str) -> list[int]:
        request = self._scheduler.requests[request_id]
        return [_TOKEN] if request.num_computed_tokens >= request.num_tokens else []
