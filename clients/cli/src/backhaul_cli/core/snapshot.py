"""What `doctor` looks at: everything that was learnt from the services, at about one moment."""

from dataclasses import dataclass, field
from enum import Enum


class Nixl(Enum):
    """Whether an agent can tell its engines to renew and to release."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    MISSING = "missing"
    AVAILABLE = "available"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine, as the directory has it. Texts are empty and numbers 0 where nothing is known."""

    engine_id: str
    rank: int = 0
    compatibility_hash: str = ""
    weights_digest: str = ""
    block_size: int = 0
    block_count: int = 0
    retention_ttl_s: float = 0.0
    connector_version: str = ""
    """Empty: the engine runs without the connector."""
    reuse: bool = True
    reuse_problem: str = ""
    vllm_version: str = ""
    second_chance: bool = False
    tp_size: int = 0
    kv_head_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node, as the directory has it."""

    node_id: str
    role: str
    """``prefill`` or ``decode``."""
    agent_address: str = ""
    engine_url: str = ""
    models: tuple[str, ...] = ()
    engines: tuple[Engine, ...] = ()
    state: str = "ready"
    """``ready``, ``not-ready`` or ``draining``."""
    state_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A service's time of day, beside that of this machine."""

    ahead_s: float
    """How far the service's is ahead."""
    uncertainty_s: float
    """Half of the time that asking took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """An engine, as its agent knows it from the connector."""

    lease_s: float = 180.0
    """``kv_lease_duration``."""
    clock_known: bool = True
    clock_jump_count: int = 0
    connected: bool = True
    retention_problem: str = ""
    side_channel_host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What an agent says of itself."""

    problem: str = ""
    """Why it could not be asked; empty when it was. Then nothing else is known."""
    refused: bool = False
    """Whether it answered, and refused: it is there."""
    too_old: bool = False
    """Whether it cannot say how it is set up."""
    clock: Clock | None = None
    nixl: Nixl = Nixl.UNKNOWN
    kv_events: bool | None = None
    connector_socket: str = ""
    engine_url_problem: str = ""
    engines: dict[str, EngineSetup] = field(default_factory=dict)
    """By engine id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Etcd:
    """etcd, as a registry replica sees it."""

    endpoint: str = ""
    version: str = ""
    size_bytes: int = 0
    revision: int = 0
    compacted: bool = True
    full: bool = False
    corrupt: bool = False
    read_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """A registry replica."""

    address: str
    problem: str = ""
    """Why it could not be asked; empty when it was."""
    too_old: bool = False
    etcd_problem: str = ""
    """Why it says nothing of etcd; empty when it does."""
    clock: Clock | None = None
    etcd: Etcd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router, over HTTP."""

    url: str
    problem: str = ""
    """Why it could not be asked; empty when it was."""
    not_ready: str = ""
    """Why it is not ready; empty when it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProbe:
    """What a model's chat template makes of a turn that has become history."""

    model: str
    kind: str
    """What the answer of that turn was: ``a plain answer``, or ``an answer with reasoning``."""
    held: tuple[int, ...]
    """Tokens of prompt and answer: those whose KV a decode engine holds after the turn."""
    prompt_count: int
    """How many of them are the prompt's."""
    following: tuple[int, ...]
    """Tokens of the next turn's prompt."""
    held_text: str = ""
    """Where the two part: how what is held goes on."""
    following_text: str = ""
    """And how the next prompt does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything."""

    registries: tuple[Registry, ...] = ()
    nodes: tuple[Node, ...] | None = ()
    """None: no registry could say."""
    agents: dict[str, Agent] = field(default_factory=dict)
    """By node id."""
    router: Router | None = None
    """None: not asked."""
    templates: tuple[TemplateProbe, ...] = ()
    template_problems: tuple[str, ...] = ()
    """Why templates could not be tried."""
    etcd_quota_bytes: int = 2 * 1024**3
    """``--quota-backend-bytes`` of etcd (server/storage/quota.go, ``DefaultQuotaBytes``)."""
