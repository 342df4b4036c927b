"""The parts of vLLM's configuration that a connector reads (``vllm/config``), made from an engine's options."""

from dataclasses import dataclass, field
from typing import Any

from backhaul_simulator.options import EngineOptions


@dataclass(frozen=True)
class CacheConfig:
    block_size: int


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_batched_tokens: int
    max_num_scheduled_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    data_parallel_index: int
    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1


@dataclass(frozen=True)
class KVTransferConfig:
    engine_id: str
    kv_connector_extra_config: dict[str, Any]
    kv_role: str = "kv_both"
    kv_buffer_device: str = "cpu"
    kv_load_failure_policy: str = "fail"

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        return self.kv_connector_extra_config.get(key, default)


@dataclass(frozen=True)
class ModelConfig:
    model: str
    revision: str | None = None
    quantization: str | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    use_mla: bool = False

    def get_total_num_kv_heads(self) -> int:
        return 1


@dataclass(frozen=True)
class LoadConfig:
    load_format: str = "dummy"


@dataclass(frozen=True)
class Ports:
    """Where a rank listens and what it tells others, of which vLLM knows nothing; 0: any, or the same."""

    host: str
    side_channel: int
    notifications: int
    advertised_notifications: int


@dataclass(frozen=True)
class VllmConfig:
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    kv_transfer_config: KVTransferConfig
    model_config: ModelConfig
    ports: Ports
    load_config: LoadConfig = field(default_factory=LoadConfig)


@dataclass(frozen=True)
class FullAttentionSpec:
    """The one kind of cache group that there is (``v1/kv_cache_interface.py``)."""

    block_size: int


@dataclass(frozen=True)
class KVCacheGroup:
    kv_cache_spec: FullAttentionSpec


@dataclass(frozen=True)
class KVCacheConfig:
    num_blocks: int
    kv_cache_groups: list[KVCacheGroup]


def config_of(options: EngineOptions, *, rank: int, engine_id: str) -> VllmConfig:
    """Returns the configuration of one rank."""
    extra: dict[str, Any] = {
        "bidirectional_kv_xfer": options.bidirectional,
        "decoder_kv_blocks_ttl": options.ttl_s,
        "kv_lease_duration": options.lease_s,
        "kv_recompute_threshold": options.recompute_threshold,
    }
    if options.connector:
        extra |= {
            "backhaul_agent_socket": options.agent_socket,
            "backhaul_min_verified": options.min_verified,
            "backhaul_max_queued": options.max_queued,
            "backhaul_weights_digest": f"simulated:{options.weights}",
            "backhaul_nixl_progress_thread": False,
        }
    return VllmConfig(
        cache_config=CacheConfig(options.block_size),
        scheduler_config=SchedulerConfig(options.max_step_tokens),
        parallel_config=ParallelConfig(data_parallel_index=rank),
        kv_transfer_config=KVTransferConfig(engine_id, extra),
        model_config=ModelConfig(options.model),
        ports=Ports(
            host=options.side_channel_host,
            side_channel=options.side_channel_port + rank,
            notifications=port_of(options.notification_port, rank),
            advertised_notifications=port_of(options.advertised_notification_port, rank),
        ),
    )


def cache_config_of(options: EngineOptions) -> KVCacheConfig:
    """Returns the description of the pool."""
    return KVCacheConfig(options.block_count, [KVCacheGroup(FullAttentionSpec(options.block_size))])


def port_of(first: int, rank: int) -> int:
    """Returns a rank's port in a row that starts with rank 0's; 0 where none is given."""
    return first + rank if first else 0
