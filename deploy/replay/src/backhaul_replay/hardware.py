"""What is to be bought: figures of a decode engine and of the prefill in front of it."""

from dataclasses import dataclass, field
from typing import Any


def _figure(default: float, meaning: str) -> Any:
    """Returns a field whose meaning the command line shows as well."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One decode engine. Of prefill engines there are enough: their queues and own prefix caches are left out."""

    block_size: int = _figure(
        4_096,
        "tokens per block; more than the engine's own makes the replay faster and the last tokens of a set coarser",
    )
    block_count: int = _figure(3_000, "blocks of the decode engine")
    prefill_tokens_per_s: float = _figure(20_000.0, "tokens per second that prefill computes")
    transfer_tokens_per_s: float = _figure(400_000.0, "tokens per second that a read moves, in either direction")
    decode_step_s: float = _figure(0.02, "seconds between two tokens of an answer")
    look_s: float = _figure(0.02, "seconds between two looks of the agent at the engine's memory, at least")
    release_s: float = _figure(
        0.08,
        "seconds from the agent's decision until blocks are free: pointer out of etcd, NIXL, the engine's next step",
    )
    harvest_s: float = _figure(0.05, "seconds from the question for cached blocks to a handle")

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
