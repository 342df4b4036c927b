"""What the node directory says of this node: computed from what the server, the side channel and the connector say."""

import ipaddress
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeVar
from urllib.parse import urlsplit

from backhaul_common.texts import clip
from backhaul_node_agent.core.block_set import EngineFacts
from backhaul_node_agent.core.bounds import MAX_ITEMS, MAX_RECORD_BYTES, MAX_TEXT_BYTES

T = TypeVar("T")

NO_CONNECTOR = (
    "no connector has come: it is not loaded (the README has the flags for engines, kv_connector_module_path in "
    "--kv-transfer-config among them), or BACKHAUL_AGENT_SOCKET names another socket than this agent's"
)
"""Shown for an engine that the side channel knows and no connector speaks for."""

_ROOM_FOR_MODELS = 20 * 1024
_ROOM_FOR_OTHERS = 4 * 1024
"""The node's names, addresses and reason."""
_ITEM_BYTES = 64
"""What an engine's numbers and the frames of its texts take at most."""
_FRAME_BYTES = 4


class Readiness(Enum):
    """Whether the node may be given work."""

    NOT_READY = auto()
    READY = auto()
    DRAINING = auto()


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the vLLM server says over HTTP."""

    healthy: bool = False
    models: tuple[str, ...] = ()
    """Names it serves; kept while it is not healthy."""
    base_models: tuple[str, ...] = ()
    """Those that are no adapters."""
    version: str = ""
    problem: str = "the server has not been asked yet"
    """Why it is not healthy."""


@dataclass(frozen=True, slots=True)
class SideChannelFacts:
    """What an engine says over NIXL's side channel."""

    engine_id: str
    compatibility_hash: str
    block_size: int
    block_count: int


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine in the directory."""

    engine_id: str
    rank: int
    """Data-parallel rank."""
    place: int
    """Which of the server's engines it is, as the server counts them."""
    compatibility_hash: str
    weights_digest: str
    block_size: int
    block_count: int
    retention_ttl_s: float
    connector_version: str
    vllm_version: str
    reuse_problem: str
    """Empty: turns on this engine can reuse blocks."""
    second_chance: bool = False
    """Whether fresh handles can be had for what the engine caches."""
    fenced: bool = False
    """Whether sets are behind a fence, where nobody else can find them."""
    tp_size: int = 0
    """Tensor-parallel size; 0 when unknown."""
    kv_head_count: int = 0
    """KV heads that tensor-parallel ranks divide among them; 0 when unknown, or when they do not."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The node in the directory."""

    models: tuple[str, ...]
    engines: tuple[EngineRecord, ...]
    readiness: Readiness
    reason: str
    left_out_count: int
    """Models and engines that have no room in a record."""
    retiring: bool = False
    """Whether the engines are not to be used any more once the node has left."""


def node_record(
    *,
    server: ServerFacts,
    engines: Iterable[EngineFacts],
    side_channels: Mapping[int, SideChannelFacts],
    connected: Iterable[str],
    advertised_host: str,
    purging: bool,
    draining: str = "",
    retiring: bool = False,
    weights_digest: str = "",
    second_chances: Iterable[str] = (),
    fenced: Iterable[str] = (),
    ranks: Collection[int] = (),
) -> NodeRecord:
    """Puts the node's record together.

    `side_channels` is by rank, `connected` names the engines whose connector is connected; `purging` while pointers of
    an incarnation that is gone are still being removed. `draining` says how far a drain is; empty: there is none.
    `weights_digest` is what engines without the connector are said to have; `second_chances` names the engines for
    which fresh handles can be had, `fenced` those with sets behind a fence. `ranks` are the server's as far as known.
    """
    known = {facts.rank: facts for facts in engines}
    there = frozenset(connected)
    offered, behind = frozenset(second_chances), frozenset(fenced)
    places = {rank: place for place, rank in enumerate(sorted({*ranks, *known, *side_channels}))}
    records = [
        _engine_record(
            rank, place, known.get(rank), side_channels.get(rank), server, there, advertised_host, weights_digest
        )
        for rank, place in places.items()
        if rank in known or rank in side_channels
    ]
    records = [replace(one, second_chance=one.engine_id in offered, fenced=one.engine_id in behind) for one in records]
    # A rank's port can be answered by an engine that is known under another rank.
    distinct = list({record.engine_id: record for record in reversed(records)}.values())[::-1]
    readiness, reason = _readiness(server, purging=purging, draining=draining)
    room = MAX_RECORD_BYTES - _ROOM_FOR_OTHERS
    shown = _fitting(distinct, _engine_bytes, room - _ROOM_FOR_MODELS)
    names = [name for name in server.models if len(name.encode()) <= MAX_TEXT_BYTES]
    models = _fitting(names, _model_bytes, room - sum(map(_engine_bytes, shown)))
    left_out = len(distinct) - len(shown) + len(server.models) - len(models)
    return NodeRecord(models, shown, readiness, clip(reason, MAX_TEXT_BYTES), left_out, retiring)


def _fitting(items: Sequence[T], size_bytes: Callable[[T], int], room: int) -> tuple[T, ...]:
    """Returns the first items for which there is room."""
    ends = itertools.accumulate(map(size_bytes, items))
    return tuple(item for item, end in zip(items[:MAX_ITEMS], ends, strict=False) if end <= room)


def _model_bytes(name: str) -> int:
    return len(name.encode()) + _FRAME_BYTES


def _engine_bytes(record: EngineRecord) -> int:
    texts = (
        record.engine_id,
        record.compatibility_hash,
        record.weights_digest,
        record.connector_version,
        record.vllm_version,
        record.reuse_problem,
    )
    return sum(len(text.encode()) for text in texts) + _ITEM_BYTES


def _engine_record(
    rank: int,
    place: int,
    facts: EngineFacts | None,
    side: SideChannelFacts | None,
    server: ServerFacts,
    connected: frozenset[str],
    advertised_host: str,
    weights_digest: str,
) -> EngineRecord:
    if facts is None:
        assert side is not None
        return EngineRecord(
            engine_id=side.engine_id,
            rank=rank,
            place=place,
            compatibility_hash=side.compatibility_hash,
            weights_digest=weights_digest,
            block_size=side.block_size,
            block_count=side.block_count,
            retention_ttl_s=0.0,
            connector_version="",
            vllm_version=server.version,
            reuse_problem=NO_CONNECTOR,
        )
    same = side if side is not None and side.engine_id == facts.engine_id else None
    return EngineRecord(
        engine_id=facts.engine_id,
        rank=rank,
        place=place,
        compatibility_hash=same.compatibility_hash if same else "",
        weights_digest=facts.weights_digest,
        block_size=facts.block_size,
        block_count=facts.block_count or (same.block_count if same else 0),
        retention_ttl_s=facts.ttl_s,
        connector_version=facts.connector_version,
        vllm_version=facts.vllm_version,
        reuse_problem=_reuse_problem(facts, connected, advertised_host),
        tp_size=facts.tp_size,
        kv_head_count=facts.kv_head_count,
    )


def _reuse_problem(facts: EngineFacts, connected: frozenset[str], advertised_host: str) -> str:
    if facts.problem:
        return clip(facts.problem, MAX_TEXT_BYTES)
    if not facts.weights_digest:
        return "the weights digest is not known yet"
    if facts.engine_id not in connected:
        return "the engine's connector is not connected"
    return side_channel_problem(facts.side_channel_host, advertised_host)


def side_channel_problem(side_channel_host: str, advertised_host: str) -> str:
    """Returns why other machines cannot reach an engine's side channel; empty when they can."""
    if not _local(side_channel_host) or _local(advertised_host):
        return ""
    return (
        f"the engine tells its peers to reach it at {side_channel_host!r}, which no other machine can: "
        "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine"
    )


def engine_url_problem(engine_url: str, advertised_host: str) -> str:
    """Returns why routers elsewhere cannot reach the server that they are told of; empty when they can."""
    if not _local(urlsplit(engine_url).hostname or "") or _local(advertised_host):
        return ""
    return (
        f"routers are told to reach the engine at {engine_url}, which no other machine can: "
        "set --advertise-engine-url to its URL with an address of this machine"
    )


def _local(host: str) -> bool:
    if host in ("", "localhost", "*"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _readiness(server: ServerFacts, *, purging: bool, draining: str) -> tuple[Readiness, str]:
    if draining:
        return Readiness.DRAINING, draining
    if not server.healthy:
        return Readiness.NOT_READY, server.problem
    if not server.models:
        return Readiness.NOT_READY, "the server has not named its models yet"
    if purging:
        return Readiness.NOT_READY, "pointers of the engine's previous incarnation are being removed"
    return Readiness.READY, ""
