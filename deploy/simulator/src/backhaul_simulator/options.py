"""What an engine is started with."""

import re
from dataclasses import dataclass

from backhaul_simulator.tokens import TEMPLATES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine process; every rank has the same."""

    model: str = "simulated"
    """Name of the model, part of vLLM's compatibility hash."""
    weights: str = "weights"
    """Names the weights: engines with different ones compute different KV content."""
    vocabulary: int = 50_000
    template: str = "whole"
    """What of a chat's history becomes prompt: ``whole``; ``drop-reasoning``, without what earlier answers thought, as
    many templates do; ``last-message``, nothing but what was said last."""
    end_rate: int = 64
    """About one generated token in so many ends the turn."""
    block_size: int = 32
    """Tokens per block."""
    block_count: int = 8192
    """Blocks of the pool, the null block included."""
    max_running: int = 256
    """Requests that run at once (``max_num_seqs``)."""
    max_step_tokens: int = 8192
    """Tokens of one scheduler step (``max_num_batched_tokens``)."""
    max_model_len: int = 32_768
    """Tokens of prompt and answer together."""
    prefill_tokens_per_s: float = 0.0
    """Speed of prefill; 0: as fast as this machine can."""
    decode_step_s: float = 0.0
    """Duration of a step that decodes; 0: as fast as this machine can."""
    transfer_block_s: float = 0.0
    """Pause before each block of a remote read."""
    ttl_s: float = 480.0
    """How long a finished turn's blocks are retained (``decoder_kv_blocks_ttl``)."""
    lease_s: float = 30.0
    """``kv_lease_duration``: retention of hand-offs, and base of heartbeats."""
    recompute_threshold: int = 64
    """``kv_recompute_threshold``: fewer remote tokens are computed rather than read."""
    min_verified: int = 64
    """``backhaul_min_verified`` of the connector."""
    max_queued: int = 10_000
    """``backhaul_max_queued`` of the connector."""
    agent_socket: str = ""
    """Unix socket of the node agent, that of rank 0 and of every other rank."""
    side_channel_host: str = "127.0.0.1"
    """Where the engine is for its peers: address of its side channel, of its memory and of its notifications."""
    side_channel_port: int = 5600
    """Port of rank 0; rank n listens at port + n."""
    advertised_side_channel_port: int = 0
    """Port that others are told in its place, for a network in between; 0: the same."""
    notification_port: int = 0
    """Port at which rank 0 takes NIXL's notifications, rank n at port + n; 0: any."""
    advertised_notification_port: int = 0
    """Port that senders are told in its place, for a network in between; 0: the same."""
    transfer_port: int = 0
    """Port at which rank 0's memory is read, rank n's at port + n; 0: any."""
    advertised_transfer_port: int = 0
    """Port that readers are told in its place, for a network in between; 0: the same."""
    kv_events: str = ""
    """Where rank 0 tells what its prefix cache stores and evicts (``--kv-events-config``), rank n n ports higher:
    tcp://*:PORT as in vLLM. Empty: nowhere."""
    bidirectional: bool = True
    """``bidirectional_kv_xfer``."""
    async_scheduling: bool = True
    """Whether a step is planned before the last one's tokens are known (vLLM's default): when a turn ends by a stop
    token, one more token counts as computed, and its content is written only with the next step."""
    connector: bool = True
    """Whether the engine runs Backhaul's connector; False: the stand-in of vLLM's own NixlConnector."""
    clock_offset_s: float = 0.0
    """Added to this process's ``time.perf_counter``."""
    clock_rate_ppm: float = 0.0
    """How much faster this process's ``time.perf_counter`` runs, in millionths."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the option that cannot be."""
        for name in ("block_size", "max_running", "max_step_tokens", "max_model_len", "end_rate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("prefill_tokens_per_s", "decode_step_s", "transfer_block_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.block_count < 2:
            raise ValueError(f"block_count must be at least 2 (one is the null block), got {self.block_count}")
        if self.template not in TEMPLATES:
            raise ValueError(f"template must be one of {', '.join(TEMPLATES)}, got {self.template!r}")
        if self.kv_events and not re.fullmatch(r"tcp://\*:[0-9]{1,5}", self.kv_events):
            # vLLM takes any other address for one to connect to, and nobody hears it.
            raise ValueError(f"kv_events must be of the form tcp://*:PORT, got {self.kv_events!r}")
        if self.connector and not self.agent_socket:
            raise ValueError("agent_socket is needed with the connector; without it set connector=False")
