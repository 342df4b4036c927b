"""How to start a vLLM engine on CPU, small enough that two of them share two cores."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backhaul_local.ports import HOST
from backhaul_local.processes import ProcessSpec

MODEL_NAME = "backhaul-demo"
"""Name under which the engines serve their model."""

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What may differ from engine to engine."""

    connector: bool = True
    """Whether it runs Backhaul's connector; else vLLM's own NixlConnector."""
    ttl_s: float = 60
    """How long blocks of a finished turn are kept (`decoder_kv_blocks_ttl`)."""
    lease_s: float = 180
    """`kv_lease_duration`: P's own hand-offs live this long, and a renewal moves a deadline by two thirds of it."""
    num_blocks: int | None = None
    """Overrides the number of KV blocks (to provoke preemption)."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Added to `kv_connector_extra_config`."""
    flags: Sequence[str] = ()
    """Added to the command line."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    agent_flags: Sequence[str] = ()
    """Added to the command line of its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """Where an engine listens and what it serves."""

    name: str
    python: Path
    model: Path
    http_port: int
    side_channel_port: int
    agent_socket: Path | None = None
    kv_events_port: int | None = None
    """Where its first rank publishes KV events; None: it does not."""


def kv_transfer_config(options: EngineOptions) -> dict[str, Any]:
    """Returns the value of --kv-transfer-config."""
    extra: dict[str, Any] = {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": options.ttl_s,
        "kv_lease_duration": options.lease_s,
        "kv_recompute_threshold": 64,
        # NIXL's own threads would take the cores from the engines.
        "num_threads": 0,
    }
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        # "recompute" never answers after a declined handle (vLLM 0.32.0). A failure is an error, then a cold turn.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }
    if options.connector:
        config["kv_connector_module_path"] = "backhaul_connector"
        extra["backhaul_nixl_progress_thread"] = False
    extra |= options.extra_config
    return config


def kv_events_config(port: int) -> dict[str, Any]:
    """Returns the value of --kv-events-config. The star makes vLLM listen: it would connect to any other address."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}


def engine_env(place: EnginePlace) -> dict[str, str]:
    """Returns the environment in which two engines on two cores do not starve each other."""
    env = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(place.side_channel_port),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "KMP_BLOCKTIME": "0",
        "UCX_TLS": "tcp,self,sm",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # POST /reset_prefix_cache, for tests.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    if place.agent_socket is not None:
        env["BACKHAUL_AGENT_SOCKET"] = str(place.agent_socket)
    return env


def engine_spec(place: EnginePlace, options: EngineOptions) -> ProcessSpec:
    """Returns how to start one engine."""
    flags = {
        "model": str(place.model),
        "served-model-name": MODEL_NAME,
        "host": HOST,
        "port": str(place.http_port),
        "distributed-executor-backend": "uni",
        # Equal texts with and without reuse need more than bfloat16's precision.
        "dtype": "float32",
        "block-size": str(BLOCK_SIZE),
        "max-model-len": "16384",
        "max-num-batched-tokens": "2048",
        "max-num-seqs": "8",
        "tool-call-parser": "hermes",
        "kv-transfer-config": json.dumps(kv_transfer_config(options)),
    }
    if place.kv_events_port is not None:
        flags["kv-events-config"] = json.dumps(kv_events_config(place.kv_events_port))
    if options.num_blocks is not None:
        flags["num-gpu-blocks-override"] = str(options.num_blocks)
    command = [str(place.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", "--enable-auto-tool-choice", *options.flags]
    return ProcessSpec(name=place.name, command=command, env={**engine_env(place), **options.env})
