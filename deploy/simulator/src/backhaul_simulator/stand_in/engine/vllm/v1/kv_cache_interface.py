"""Cache groups."""

from backhaul_simulator.vllm_config import FullAttentionSpec, KVCacheConfig

__all__ = ["FullAttentionSpec", "KVCacheConfig"]
