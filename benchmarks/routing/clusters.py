"""The engines that loads are played on: how fast each one is."""

from collections.abc import Mapping
from dataclasses import dataclass

BLOCK_SIZE = 64
"""Tokens per block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One engine."""

    prefill_tokens_per_s: float = 8_000.0
    decode_step_s: float = 0.015
    """From one token of an answer to the next."""
    step_tokens: int
    """Tokens that one step computes at most."""
    block_count: int

    def slower(self, times: float) -> "Speed":
        """Returns the same engine, so many times slower."""
        return Speed(
            prefill_tokens_per_s=self.prefill_tokens_per_s / times,
            decode_step_s=self.decode_step_s * times,
            step_tokens=self.step_tokens,
            block_count=self.block_count,
        )


PREFILL = Speed(step_tokens=2_048, block_count=700)
"""Its memory holds less than what the conversations of a load have in all, as in life."""

DECODE = Speed(step_tokens=512, block_count=2_500)
"""Its steps are short: nobody's answer stops for long while a prompt is computed."""

TRANSFER_BLOCK_S = 0.001
"""Reading one block: 64,000 tokens per second, eight times as fast as computing them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Engines of one model."""

    prefill: tuple[Speed, ...] = (PREFILL, PREFILL)
    decode: tuple[Speed, ...] = (DECODE, DECODE)
    transfer_block_s: float = TRANSFER_BLOCK_S


CLUSTERS: Mapping[str, Cluster] = {
    "even": Cluster(),
    "slow-prefill": Cluster(prefill=(PREFILL.slower(4), PREFILL)),
    "slow-decode": Cluster(decode=(DECODE.slower(4), DECODE)),
    "slow-transfer": Cluster(transfer_block_s=10 * TRANSFER_BLOCK_S),
}
