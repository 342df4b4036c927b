"""The nodes as the registry last told, and which of them can work together."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from urllib.parse import urlsplit

from backhaul_router.core.tensor_parallel import reads


class Role(Enum):
    """What a node does."""

    PREFILL = "prefill"
    DECODE = "decode"

    # As for whatever keys what every turn looks up: an enumeration's own hash is a function in Python.
    __hash__ = object.__hash__


class NodeState(Enum):
    """Whether a node may be given work."""

    NOT_READY = "not_ready"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Engine:
    """One vLLM engine of a node."""

    engine_id: str
    compatibility_hash: str = ""
    """Empty when unknown."""
    weights_digest: str = ""
    """Empty when unknown."""
    connector_version: str = ""
    """Empty when the engine runs without Backhaul's connector."""
    reuse: bool = False
    """Whether its turns can reuse blocks."""
    second_chance: bool = False
    """Whether its owner gives fresh handles for what it caches."""
    fenced: bool = False
    """Whether it retains block sets to which no pointer leads yet, since its agent has started anew."""
    rank: int = 0
    """Which of the server's engines it is, as the server counts them."""
    block_size: int = 0
    """Tokens per block; 0 when unknown."""
    block_count: int = 0
    """Blocks in its KV cache; 0 when unknown."""
    tp_size: int = 0
    """Tensor-parallel size; 0 when unknown."""
    kv_head_count: int = 0
    """KV heads that tensor-parallel ranks divide among them; 0 when unknown, or when they do not."""
    reuse_problem: str = field(default="", compare=False)
    """For people: why its turns cannot reuse blocks."""
    vllm_version: str = ""
    """Empty when unknown."""
    retention_ttl_s: float = 0.0
    """How long it keeps a finished turn's blocks by itself; 0 when unknown."""


@dataclass(frozen=True, slots=True)
class Node:
    """One vLLM server with its agent."""

    node_id: str
    role: Role
    agent_address: str
    engine_url: str
    models: frozenset[str]
    engines: tuple[Engine, ...]
    state: NodeState
    retiring: bool = False
    """Whether its engine is not to be used any more once the node has left."""
    orphaned: bool = False
    """Whether it is listed no longer, as its agent is gone or ends, and its engine goes on."""
    session: str = field(default="", compare=False)
    """The agent's process, new at every start: the same node all the same."""
    state_reason: str = field(default="", compare=False)
    """For people: why it is not ready."""

    def engine(self, engine_id: str) -> Engine | None:
        """Returns the engine with this id; None when that incarnation is gone."""
        return next((engine for engine in self.engines if engine.engine_id == engine_id), None)

    @property
    def endpoint(self) -> str:
        """host:port of its engine, IPv6 in brackets."""
        url = urlsplit(self.engine_url)
        return url.netloc if url.port else f"{url.netloc}:{443 if url.scheme == 'https' else 80}"

    @property
    def ready(self) -> bool:
        """Whether it is listed, and may be given work."""
        return self.state is NodeState.READY and not self.orphaned

    @property
    def usable(self) -> bool:
        """Whether its engine may be given a turn, were it only where there is no better one.

        An agent that merely ends drains its node, and its engine goes on.
        """
        return self.state is NodeState.READY or (self.state is NodeState.DRAINING and not self.retiring)

    @property
    def reuse(self) -> bool:
        """Whether every engine of the node verifies and retains block sets."""
        return bool(self.engines) and all(engine.reuse and engine.connector_version for engine in self.engines)

    @property
    def stock(self) -> bool:
        """Whether the engines are known to run without Backhaul's connector."""
        return bool(self.engines) and not any(engine.connector_version for engine in self.engines)


def compatible(prefill: Node, decode: Node) -> bool:
    """Tells whether two nodes can exchange blocks, as far as is known.

    An engine never exchanges with itself (one server that two agents list, in both roles): vLLM fails a turn whose
    blocks are its own.
    """
    if prefill.engine_url == decode.engine_url:
        return False
    pairs = [(one, other) for one in prefill.engines for other in decode.engines]
    return all(one.engine_id != other.engine_id and exchange(one, other) for one, other in pairs)


def exchange(prefill: Engine, decode: Engine) -> bool:
    """Tells whether two engines are built so that they can exchange blocks, as far as is known.

    Engines with different NIXL compatibility hashes (vLLM's `nixl/metadata.py`, `compute_nixl_compatibility_hash`:
    versions, model, dtypes, attention), different weights or different block sizes never exchange. Nor do engines of
    tensor-parallel sizes that vLLM refuses when they shake hands.
    """
    return (
        _equal_if_known(prefill.compatibility_hash, decode.compatibility_hash)
        and _equal_if_known(prefill.weights_digest, decode.weights_digest)
        and _equal_if_known(prefill.block_size, decode.block_size)
        and reads(decode.tp_size, prefill.tp_size, prefill.kv_head_count or decode.kv_head_count)
    )


def same_weights(one: Node, other: Node) -> bool:
    """Tells whether two nodes are known to have the same weights."""
    digests = {engine.weights_digest for engine in (*one.engines, *other.engines)}
    return len(digests) == 1 and "" not in digests


def _reuses(prefill: Node, decode: Node) -> bool:
    chances = any(engine.second_chance for engine in decode.engines) and same_weights(prefill, decode)
    return (prefill.reuse and decode.reuse) or (chances and (prefill.reuse or prefill.stock))


def _serves(node: Node, role: Role, model: str) -> bool:
    return node.role is role and node.usable and model in node.models


def _equal_if_known(one: str | int, other: str | int) -> bool:
    return not one or not other or one == other


class NodeTable:
    """All nodes. Block sets of a node that is not ready, or not even listed, are nobody's business here.

    A node that was well and is listed no longer has lost its agent, and its engine may well go on. It is *orphaned*: it
    serves turns where no ready node can, without reuse, until it is listed again or `drop_orphan` is called as its
    engine does not answer. So does a node whose agent is just ending (DRAINING, left in good order). Only a retiring
    node gets nothing more: an operator takes its engine out of service.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._orphans: dict[str, Node] = {}
        self.version = 0
        """Another one after each change."""

    def replace(self, nodes: Iterable[Node]) -> None:
        """Takes a snapshot."""
        listed = {node.node_id: node for node in nodes}
        self.change(listed.values(), self._nodes.keys() - listed.keys())

    def change(self, upserts: Iterable[Node], removals: Iterable[str]) -> None:
        """Takes a change."""
        self.version += 1
        for node_id in removals:
            node = self._nodes.pop(node_id, None)
            if node is not None and node.usable:
                self._orphans[node_id] = replace(node, state=NodeState.READY, orphaned=True)
        for node in upserts:
            self._nodes[node.node_id] = node
        served = {node.engine_url for node in self._nodes.values()}
        self._orphans = {key: orphan for key, orphan in self._orphans.items() if orphan.engine_url not in served}

    def drop_orphan(self, node_id: str) -> None:
        """Forgets an orphaned node; nothing happens when it is none."""
        self.version += 1
        self._orphans.pop(node_id, None)

    @property
    def orphans(self) -> list[Node]:
        """Nodes whose agent is gone."""
        return [*self._orphans.values()]

    def get(self, node_id: str) -> Node | None:
        """Returns a listed node by id."""
        return self._nodes.get(node_id)

    def known(self, node_id: str) -> Node | None:
        """Returns a node by id, listed or orphaned."""
        return self._nodes.get(node_id) or self._orphans.get(node_id)

    def __iter__(self) -> Iterator[Node]:
        return iter([*self._nodes.values(), *self._orphans.values()])

    def __len__(self) -> int:
        return len(self._nodes) + len(self._orphans)

    def serves(self, model: str) -> bool:
        """Tells whether any node serves a model, ready or not."""
        return any(model in node.models for node in self)

    def ready(self, role: Role, model: str) -> list[Node]:
        """Returns the ready nodes of a role that serve a model; if there is none, those whose agent ends or is gone."""
        able = [node for node in self if _serves(node, role, model)]
        return [node for node in able if node.ready] or able

    def pairs(self, model: str) -> Iterator[tuple[Node, Node]]:
        """Yields all pairs of prefill and decode node that can serve a model; who needs one of them looks at few."""
        decodes = self.ready(Role.DECODE, model)
        return ((p, d) for p in self.ready(Role.PREFILL, model) for d in decodes if compatible(p, d))

    def reuses(self) -> bool:
        """Tells whether any turn can reuse blocks: retained ones, or what is merely cached."""
        models = {model for node in self for model in node.models}
        return any(_reuses(p, d) for model in models for p, d in self.pairs(model))

    def problem(self) -> str:
        """Says why no turn can be served over two nodes; empty when one can."""
        if not len(self):
            return "no nodes are known"
        models = {model for node in self for model in node.models}
        if any(True for model in models for _ in self.pairs(model)):
            return ""
        for role in Role:
            if not any(self.ready(role, model) for model in models):
                return f"no {role.value} node is ready"
        return "no prefill node can exchange blocks with a decode node of the same model"
