"""The router's configuration."""

from typing import Literal

from pydantic import ByteSize, Field, field_validator, model_validator

from backhaul_common.addresses import Address, Addresses, OptionalAddress, loopback
from backhaul_common.config import Texts
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.tls import EngineTlsSettings, TlsFiles
from backhaul_router.core.turn import Route

_SPARE_FILES = 1024
"""For gRPC's connections to gateways, registries and agents, and for model lists."""
_LEAST_SPARE_FILES = 44
"""The same for a router that may open few: it has 20 before anybody connects, accepts and parts from a few."""

_LEAST_GOODBYES = 8
_CONNECTIONS_PER_GOODBYE = 4


class Config(EngineTlsSettings, env_prefix="BACKHAUL_ROUTER_"):
    """Settings of one router. Durations are seconds."""

    listen_http: Address = "127.0.0.1:8080"
    """host:port of the OpenAI HTTP API (IPv6 in brackets)"""
    listen_grpc: Address = "127.0.0.1:8081"
    """host:port of the gRPC API"""
    listen_console: OptionalAddress = ""
    """host:port of the console, a page for operators (see docs/console.md); empty: none"""
    console_key_file: str = ""
    """file with the hashes of operators' keys, as backhaul-router-key prints them; needed but for a console that only
    this machine reaches, where there are no tenants"""
    listen_ext_proc: OptionalAddress = ""
    """host:port of the endpoint picker for Envoy (see docs/envoy.md); empty: none"""
    listen_gateway: OptionalAddress = ""
    """host:port for gateways that move the bytes of turns themselves (see docs/grpc.md), and no others; empty: none"""
    listen_metrics: OptionalAddress = ""
    """host:port on which Prometheus reads /metrics (see docs/metrics.md), over TLS where the services use it; empty:
    nothing is counted"""
    registry: Addresses
    """host:port of each registry replica, comma-separated"""
    tls_agent_name: str = ""
    """name that the agents' certificates must have; empty: the host of their address"""
    client_ca: str = ""
    """PEM file with the CAs of clients' certificates, for the HTTP and the gRPC API; empty: clients need none"""
    lookup_budget_s: float = Field(default=0.05, gt=0, le=1)
    """time that a turn may spend on finding and claiming what it can reuse"""
    harvest_budget_s: float = Field(default=0.25, ge=0, le=5)
    """time that a turn with nothing to claim may spend on getting what a decode engine still caches; 0: none"""
    routes: Texts = ("cold", "warm", "append")
    """routes that turns may take, comma-separated; cold must be among them: it is what is left when nothing else
    works"""
    prefer: Literal["auto", "cold", "warm", "append"] = "auto"
    """auto: the route that promises the first token soonest; else that one wherever it can be taken"""
    routing_file: str = ""
    """TOML file with limits, plugins and their weights: see docs/routing.md"""
    explain: bool = False
    """tell callers who ask how a turn is routed (Explain, x-backhaul-explain: on); the answers name nodes"""
    tenants_file: str = ""
    """TOML file with the tenants, hashes of their keys, their limits, and whose tokens are taken (see docs/tenants.md),
    read anew when it changes; without it there is no authentication"""
    cluster_key_file: str = ""
    """file with the secret that separates tenants inside engines' caches; needed with tenants, equal on all routers"""
    engine_key_file: str = ""
    """file with the API key that engines want; without it clients' own keys are passed on, unless there are tenants"""
    body_limit: ByteSize = Field(default=ByteSize(16 * 1024 * 1024), gt=0, le=1024**3)
    """largest request body, such as 16MiB"""
    max_turns: int = Field(default=1024, gt=0)
    """turns at once; what comes on top waits if it may, or is refused with 429"""
    max_queued: int = Field(default=0, ge=0)
    """turns that wait until one ends; 0: none, all are refused at once"""
    queue_timeout_s: float = Field(default=30.0, gt=0)
    """how long a turn waits at most; then it is refused with 503"""
    max_held: ByteSize = Field(default=ByteSize(256 * 1024 * 1024), gt=0)
    """request bodies of all running turns together; what comes on top is refused with 429"""
    answer_limit: ByteSize = Field(default=ByteSize(64 * 1024 * 1024), gt=0)
    """largest answer of an engine that is not a stream; a larger one is a 502"""
    max_connections: int = Field(default=4096, gt=0)
    """open connections over HTTP, and over gRPC; beyond it HTTP's oldest idle one makes room, else none more"""
    receive_timeout_s: float = Field(default=60.0, gt=0)
    """a client's sending of a request's head, and again of its body"""
    send_timeout_s: float = Field(default=60.0, gt=0)
    """a client's taking of what waits for it; one that does not read is cut off"""
    prefill_fallback: Literal["strict", "decode"] = "decode"
    """without a prefill node: refuse with 503 (strict), or let the decode engine compute the prompt (decode)"""
    keep_constraints: Texts = ("kimi-k3",)
    """parts of names of models whose chat template shows response formats and forced tools to the model,
    comma-separated"""
    connect_timeout_s: float = Field(default=5.0, gt=0, le=15)
    """connecting to an engine; well below the time that prefill engines keep blocks, their kv_lease_duration: 180 in
    docs/engines.md, 30 by vLLM's default"""
    prefill_timeout_s: float = Field(default=600.0, gt=0)
    """a whole prefill leg"""
    warm_prefill_timeout_s: float = Field(default=20.0, gt=0)
    """a whole prefill leg that reads blocks; after it the leg is repeated cold"""
    first_byte_timeout_s: float = Field(default=600.0, gt=0)
    """first piece of the decode engine's answer"""
    gone_timeout_s: float = Field(default=15.0, gt=0)
    """how long a node may be not ready before requests that wait there go elsewhere; with the 9 s that its agent needs
    to notice, below the kv_lease_duration of prefill engines"""
    idle_timeout_s: float = Field(default=120.0, gt=0)
    """silence between two pieces of the decode engine's answer"""
    plan_send_s: float = Field(default=10.0, gt=0, le=60)
    """how long a gateway may keep a planned turn before it says that it sends it; below the kv_lease_duration of
    prefill engines"""
    plan_report_s: float = Field(default=600.0, gt=0)
    """how long after each report of a planned turn a gateway must say again how it goes"""
    lame_duck_s: float = Field(default=5.0, ge=0)
    """how long a router that stops says so, and still takes new turns, before it closes its ports"""
    grace_s: float = Field(default=30.0, ge=0)
    """time for running turns after that"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least level that is logged"""

    @field_validator("routes")
    @classmethod
    def _known_routes(cls, routes: tuple[str, ...]) -> tuple[str, ...]:
        known = [route.value for route in Route]
        if unknown := [route for route in routes if route not in known]:
            raise ValueError(f"there is no route {unknown[0]!r}; there are {', '.join(known)}")
        if Route.COLD.value not in routes:
            raise ValueError("cold must be among them: it is what is left when nothing else works")
        return routes

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.prefer not in ("auto", *self.routes):
            raise ValueError(f"prefer is {self.prefer}, which is not among the routes ({', '.join(self.routes)})")
        if self.console_key_file and not self.listen_console:
            raise ValueError("console_key_file means nothing without listen_console")
        if self.listen_console and not self.console_key_file and not self._console_is_private:
            raise ValueError(
                "listen_console needs console_key_file, unless only this machine reaches it and there are no tenants: "
                "write the second line that backhaul-router-key prints into that file"
            )
        if self.max_held < self.body_limit:
            raise ValueError(f"max_held must be at least body_limit ({int(self.body_limit)} bytes)")
        return self

    @property
    def _console_is_private(self) -> bool:
        return loopback(self.listen_console) and not self.tenants_file

    @property
    def needing_tls(self) -> tuple[str, ...]:
        """Settings that mean nothing without a certificate."""
        return (*super().needing_tls, "tls_agent_name", "client_ca")

    @property
    def client_files(self) -> TlsFiles | None:
        """What clients are shown, and whom they must be certified by; None without TLS."""
        return TlsFiles(cert=self.tls_cert, key=self.tls_key, ca=self.client_ca) if self.tls_cert else None

    @property
    def open_files(self) -> int:
        """Sockets that a router at its limits has open, with some to spare."""
        return self._counted_files + _SPARE_FILES

    @property
    def goodbyes(self) -> int:
        """Connections that may stay open for a moment after they were refused."""
        return max(_LEAST_GOODBYES, self.max_connections // _CONNECTIONS_PER_GOODBYE)

    @property
    def _counted_files(self) -> int:
        # To engines a turn has one connection that it uses, one that is kept for the next, and one that is left.
        # Clients have as many connections over HTTP as over gRPC.
        return 2 * self.max_connections + self.max_connections // _CONNECTIONS_PER_GOODBYE + 3 * self.max_turns

    def within(self, files: int) -> "Config":
        """Returns the configuration with no more connections and turns than ``files`` open files allow.

        Raises InvalidArgumentError when they allow hardly any.
        """
        if files >= self.open_files:
            return self
        share = (files - max(_LEAST_SPARE_FILES, files // 4)) / self._counted_files
        connections, turns = int(self.max_connections * share), int(self.max_turns * share)
        if connections < 1 or turns < 1:
            raise InvalidArgumentError("TOO_FEW_OPEN_FILES", f"{files} open files are allowed: raise the limit")
        return self.model_copy(update={"max_connections": connections, "max_turns": turns})
