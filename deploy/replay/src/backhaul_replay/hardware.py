"""What is to be bought: figures of a decode engine and of the prefill in front of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One decode engine. Of prefill engines there are enough: their queues and own prefix caches are left out."""

    block_size: int = 4_096
    """Tokens per block. Greater than an engine's own where speed of the replay matters more than the last tokens."""
    block_count: int = 3_000
    """Blocks that the engine can give out."""
    prefill_tokens_per_s: float = 20_000.0
    transfer_tokens_per_s: float = 400_000.0
    """Speed of a read, in either direction."""
    decode_step_s: float = 0.02
    """Time between two tokens of an answer."""
    look_s: float = 0.02
    """How often the agent looks at the engine's memory at most."""
    release_s: float = 0.08
    """From the agent's decision until the blocks are free: pointer out of etcd, NIXL, the engine's next step."""
    harvest_s: float = 0.05
    """From the question for cached blocks to a handle."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the figure that cannot be."""
        for name in ("block_size", "block_count"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("prefill_tokens_per_s", "transfer_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")
        for name in ("decode_step_s", "look_s", "release_s", "harvest_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
