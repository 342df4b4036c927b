"""Settings of the node agent."""

import os
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from backhaul_common.addresses import Address, Addresses, OptionalAddress, split_address
from backhaul_common.tls import EngineTlsSettings
from backhaul_node_agent.core import bounds

MAX_DRAIN_S = 86_400.0
"""Longest time that a drain may take."""
_EVERYWHERE = ("0.0.0.0", "::")
_NODE_ID = re.compile(r"^[A-Za-z0-9._:-]{1,128}$")


class Config(EngineTlsSettings, env_prefix="BACKHAUL_NODE_AGENT_"):
    """Settings; see each field. Durations are in seconds, addresses are host:port with IPv6 in brackets."""

    engine_url: str = "http://127.0.0.1:8200"
    """Base URL of the vLLM server beside this agent."""
    advertise_engine_url: str = ""
    """Base URL under which routers reach that server; empty: the same as engine_url."""
    side_channel: Address = "127.0.0.1:5600"
    """NIXL side channel of the server's first engine, host:port, as this agent reaches it; rank n listens n ports
    higher."""
    role: Literal["prefill", "decode"] = "decode"
    """What the server does."""
    registry: Addresses = ("127.0.0.1:7100",)
    """Registry replicas, host:port, comma-separated; the agent moves to the next one when one fails."""
    listen: Address = "127.0.0.1:7201"
    """Address of this agent's gRPC server, host:port."""
    listen_metrics: OptionalAddress = ""
    """Address on which Prometheus reads /metrics (see docs/metrics.md), host:port, over TLS where the services use it;
    empty: nothing is counted."""
    advertise: str = ""
    """Address under which routers reach this agent, host:port; empty: the same as listen, which then names one
    address."""
    node_id: str = ""
    """Stable name of the node; empty: the advertised address."""
    connector_socket: str = ""
    """Unix socket on which the engine's connector finds this agent; empty: <node-id>.sock in /run/backhaul, or in
    $XDG_RUNTIME_DIR/backhaul where /run cannot be written."""
    lease_ttl_s: float = Field(default=10.0, ge=2.0, le=60.0)
    """How long the node stays in the directory when this agent vanishes."""
    lease_margin_s: float = Field(default=0.5, ge=0.05)
    """How much earlier than the lease the agent stops granting; less than a third of it."""
    claim_ttl_s: float = Field(default=30.0, ge=7.0, le=120.0)
    """How long a prefill engine has for its read. Before it is lowered, let one old value pass between the end of the
    old agent and the start of the new one: the new one waits only for claims of its own length."""
    margin_s: float = Field(default=2.0, ge=0.5, le=30.0)
    """What is kept between a claim's deadline and the engine's, and between a lapse and what follows it."""
    retained_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of the engine's blocks that finished turns may hold. Needs nixl, as do all of retention's settings."""
    pressure_mark: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of the engine's blocks that finished turns, running and waiting requests may fill together: beyond it
    finished turns give way. At least retained_share."""
    retention_policy: Literal["lru", "benefit"] = "benefit"
    """Which turns give way first: those that ended first, or those that save least prefill for the memory they hold."""
    max_retention_s: float = Field(default=1800.0, ge=1.0, le=86_400.0)
    """How long a finished turn is kept at most, however short the engine's own time is; at least claim_ttl_s."""
    kv_events: str = ""
    """Where the server's first engine publishes KV events, as this agent reaches it: tcp://host:port; rank n does so n
    ports higher. With it, turns whose blocks are retained no more get a second chance while the engine still caches
    them. Empty: off. The engine needs --kv-events-config with the endpoint tcp://*:PORT."""
    weights_digest: str = ""
    """Names the weights of an engine without Backhaul's connector; empty: unknown. Blocks are exchanged only between
    engines of which the same name is known: whoever gives it vouches for equal weights."""
    engine_lease_s: float = Field(default=30.0, ge=15.0, le=3600.0)
    """kv_lease_duration of an engine without Backhaul's connector: how long it keeps blocks for a reader. Never more
    than the engine was started with (vLLM's default is 30): beyond it a reader may find other content in the blocks."""
    engine_key_file: str = ""
    """File with the API key of the server, where it asks for one (vLLM's --api-key); empty: none."""
    stall_s: float = Field(default=120.0, ge=1.0, le=3600.0)
    """How long an engine that has requests may show no progress in its metrics before the node is not ready."""
    drain_s: float = Field(default=10.0, ge=0.0, le=3600.0)
    """When the agent is asked to end: how long it waits for what runs and releases what it holds. It takes up to 3 s
    more to leave."""
    drain_timeout_s: float = Field(default=600.0, ge=0.0, le=MAX_DRAIN_S)
    """When an operator drains the node without a timeout: after how long it leaves whatever still runs."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""

    @field_validator("engine_url", "advertise_engine_url")
    @classmethod
    def _url(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.field_name == "advertise_engine_url":
            return value
        # A port that cannot be raises ValueError itself.
        if not re.match(r"^https?://[^/\s]+/?$", value) or not urlsplit(value).hostname or urlsplit(value).port == 0:
            raise ValueError("must be a URL without a path, such as http://127.0.0.1:8200")
        return value.rstrip("/")

    @field_validator("kv_events")
    @classmethod
    def _zmq(cls, value: str) -> str:
        if value and not value.startswith("tcp://"):
            raise ValueError("must be tcp://host:port, such as tcp://127.0.0.1:5557")
        if not value:
            return value
        host, port = split_address(value.removeprefix("tcp://"))
        if host in ("*", *_EVERYWHERE) or not port:
            raise ValueError("must name the host and port on which the engine publishes: the agent connects to it")
        return value

    @field_validator("weights_digest")
    @classmethod
    def _weights(cls, value: str) -> str:
        bounds.check_text(value, "weights_digest")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        host, _ = split_address(self.advertised)
        if host in _EVERYWHERE:
            raise ValueError(f"advertise is needed: {host} is not an address that routers can reach")
        if not _NODE_ID.match(self.node):
            raise ValueError("node_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -")
        if self.lease_margin_s > self.lease_ttl_s / 3:
            raise ValueError("lease_margin_s must be at most a third of lease_ttl_s")
        if self.retained_share > self.pressure_mark:
            raise ValueError("retained_share must be at most pressure_mark: finished turns would give way at once")
        if self.max_retention_s < self.claim_ttl_s:
            raise ValueError("max_retention_s must be at least claim_ttl_s: a turn could not be read in time")
        return self

    @property
    def advertised(self) -> str:
        """Address under which routers reach this agent."""
        return self.advertise or self.listen

    @property
    def advertised_engine_url(self) -> str:
        """Base URL under which routers reach the vLLM server."""
        return self.advertise_engine_url or self.engine_url

    @property
    def kv_events_address(self) -> tuple[str, int] | None:
        """Host and port of the first engine's KV events; None without them."""
        return split_address(self.kv_events.removeprefix("tcp://")) if self.kv_events else None

    @property
    def node(self) -> str:
        """Name of the node."""
        return self.node_id or self.advertised.replace("[", "").replace("]", "")

    @property
    def socket_path(self) -> Path:
        """Path of the connector's socket."""
        return Path(self.connector_socket) if self.connector_socket else _runtime_folder() / f"{self.node}.sock"


def _runtime_folder() -> Path:
    home = os.environ.get("XDG_RUNTIME_DIR")
    if os.access("/run", os.W_OK) or not home:
        return Path("/run/backhaul")
    return Path(home) / "backhaul"
