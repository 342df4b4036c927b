"""Which nodes cannot work with any of the other role, and in what they differ."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from backhaul_router.core.console.problems import Found, Severity
from backhaul_router.core.nodes import Engine, Node, NodeTable, Role, compatible
from backhaul_router.core.tensor_parallel import reads

MOST_WAYS = 5
"""Differences that are named; of more it says how many there are."""

_DIGEST_LENGTH = 12
"""Of a digest so much is shown; doctor shows the same."""


def pairing_of(table: NodeTable) -> tuple[Found, ...]:
    """Returns why nodes cannot work together. It compares pairs: ask once for each version of the table."""
    remedy = "see what is said of the nodes below, and their records under Nodes"
    problem = table.problem() if len(table) else ""
    text = f"no turn can be served over two engines: {problem}"
    return (*([(Severity.ERROR, text, remedy, "")] if problem else []), *_unlike(table))


def _unlike(table: NodeTable) -> Iterator[Found]:
    """Yields how nodes differ from all those of the other role that serve their models."""
    remedy = "run the same vLLM, connector, weights, block size and dtypes on both sides"
    listed = sorted((node for node in table if not node.orphaned), key=lambda node: node.role is Role.DECODE)
    alone: set[str] = set()
    for node in listed:
        peers = [peer for peer in listed if _may_work_with(node, peer)]
        text = _apart(node, peers)
        # Where a decode node has no partner because no prefill node has one, they have said so.
        if text and (node.role is Role.PREFILL or not all(peer.node_id in alone for peer in peers)):
            yield Severity.ERROR, text, remedy, node.node_id
        if text:
            alone.add(node.node_id)


def _may_work_with(node: Node, peer: Node) -> bool:
    return peer.role is not node.role and peer.engine_url != node.engine_url and bool(peer.models & node.models)


def _apart(node: Node, peers: Sequence[Node]) -> str:
    """Returns how a node differs from all these; empty where there is one that it works with."""
    if any(peer.reuse and _fits(node, peer) and _reads_back(node, peer) for peer in peers):
        return ""
    fitting = [peer for peer in peers if _fits(node, peer)]
    if peers and not fitting:
        return _told("can exchange blocks with", node, peers)
    # Those without reuse have a problem of their own.
    reusing = [peer for peer in fitting if node.reuse and peer.reuse]
    return _told("can reuse blocks with", node, reusing) if reusing else ""


def _told(what: str, node: Node, peers: Sequence[Node]) -> str:
    pairs = (pair for peer in peers for pair in _engines(node, peer))
    ways = {way for one, other in pairs for way in _differences(one, other)}
    more = f"; and {len(ways) - MOST_WAYS} more" if len(ways) > MOST_WAYS else ""
    return f"{what} no {peers[0].role.value} node of its models: {'; '.join(sorted(ways)[:MOST_WAYS])}{more}"


def _fits(node: Node, peer: Node) -> bool:
    return compatible(node, peer) if node.role is Role.PREFILL else compatible(peer, node)


def _reads_back(node: Node, peer: Node) -> bool:
    """Tells whether connectors can read what was retained, which takes more than a hand-off of vLLM's own."""
    return all(
        not _differ(one.connector_version, other.connector_version) and _sizes_fit(one, other)
        for one, other in _engines(node, peer)
    )


def _engines(node: Node, peer: Node) -> Iterable[tuple[Engine, Engine]]:
    return product(node.engines, peer.engines)


def _differences(one: Engine, other: Engine) -> Iterator[str]:
    """Yields how an engine differs from another; its own value first."""
    if _differ(one.block_size, other.block_size):
        yield f"block sizes differ ({one.block_size} tokens here, {other.block_size} there)"
    if _differ(one.weights_digest, other.weights_digest):
        yield f"weights differ (digest {_both(one.weights_digest, other.weights_digest)})"
    if _differ(one.connector_version, other.connector_version):
        yield f"versions of the connector differ ({one.connector_version} here, {other.connector_version} there)"
    if _differ(one.vllm_version, other.vllm_version):
        yield f"versions of vLLM differ ({one.vllm_version} here, {other.vllm_version} there)"
    elif _differ(one.compatibility_hash, other.compatibility_hash):
        hashes = _both(one.compatibility_hash, other.compatibility_hash)
        yield f"NIXL's compatibility hashes differ ({hashes}): model, dtypes, attention or layout"
    if not _sizes_fit(one, other):
        yield f"tensor-parallel sizes do not fit ({one.tp_size} here, {other.tp_size} there)"


def _sizes_fit(one: Engine, other: Engine) -> bool:
    """Tells whether each can read from the other: a hand-off goes one way, what is reused the other."""
    heads = one.kv_head_count or other.kv_head_count
    return reads(one.tp_size, other.tp_size, heads) and reads(other.tp_size, one.tp_size, heads)


def _both(one: str, other: str) -> str:
    """Shows the beginnings of two digests; all of them where these are alike, as of two names."""
    length = _DIGEST_LENGTH if one[:_DIGEST_LENGTH] != other[:_DIGEST_LENGTH] else None
    return f"{one[:length]} here, {other[:length]} there"


def _differ(one: str | int, other: str | int) -> bool:
    """Tells whether both are known, and different."""
    return bool(one) and bool(other) and one != other
