"""The router's configuration."""

from typing import Literal

from pydantic import ByteSize, Field

from backhaul_common.addresses import Address, Addresses
from backhaul_common.config import ServiceConfig, Texts


class Config(ServiceConfig, env_prefix="BACKHAUL_ROUTER_"):
    """Settings of one router. Durations are seconds."""

    listen_http: Address = "127.0.0.1:8080"
    """host:port of the OpenAI HTTP API (IPv6 in brackets)"""
    listen_grpc: Address = "127.0.0.1:8081"
    """host:port of the gRPC API"""
    registry: Addresses
    """host:port of each registry replica"""
    lookup_budget_s: float = Field(default=0.05, gt=0, le=1)
    """time that a turn may spend on finding and claiming what it can reuse"""
    tenants_file: str = ""
    """TOML file with [tenants.NAME] key_sha256 = ["<hex>"]; without it there is no authentication"""
    cluster_key_file: str = ""
    """file with the secret that separates tenants inside engines' caches; needed with tenants, equal on all routers"""
    engine_key_file: str = ""
    """file with the API key that engines want; without it clients' own keys are passed on, unless there are tenants"""
    body_limit: ByteSize = Field(default=ByteSize(16 * 1024 * 1024), gt=0, le=1024**3)
    """largest request body, such as 16MiB"""
    prefill_fallback: Literal["strict", "decode"] = "decode"
    """without a prefill node: refuse with 503 (strict), or let the decode engine compute the prompt (decode)"""
    keep_constraints: Texts = ("kimi-k3",)
    """parts of names of models whose chat template shows response formats and forced tools to the model"""
    connect_timeout_s: float = Field(default=5.0, gt=0, le=15)
    """connecting to an engine, a free connection included; well below the 30 s that prefill engines keep blocks"""
    prefill_timeout_s: float = Field(default=600.0, gt=0)
    """a whole prefill leg"""
    warm_prefill_timeout_s: float = Field(default=20.0, gt=0)
    """a whole prefill leg that reads blocks; after it the leg is repeated cold"""
    first_byte_timeout_s: float = Field(default=600.0, gt=0)
    """first piece of the decode engine's answer"""
    idle_timeout_s: float = Field(default=120.0, gt=0)
    """silence between two pieces of the decode engine's answer"""
    pool_size: int = Field(default=4096, gt=0)
    """connections to all engines together"""
    grace_s: float = Field(default=30.0, ge=0)
    """time for running turns when the router stops"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least level that is logged"""
