"""Whether each engine has a partner that it can exchange blocks with."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from backhaul_cli.core.finding import Finding, error
from backhaul_cli.core.snapshot import Engine, Node, Snapshot

_SHOWN = 12
"""Characters of a digest that are shown."""


@dataclass(frozen=True, slots=True)
class _Placed:
    node: Node
    engine: Engine


@dataclass(frozen=True, slots=True)
class _Difference:
    check: str
    what: str
    fix: str


def pairs(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds engines that no engine of the other role fits; each with what differs, and from whom."""
    placed = [_Placed(node, engine) for node in snapshot.nodes or () for engine in node.engines]
    prefill = [one for one in placed if one.node.role == "prefill"]
    decode = [one for one in placed if one.node.role == "decode"]
    if not prefill or not decode:
        return
    lonely = {id(one): found for one in decode if (found := _alone(one, prefill))}
    lonely |= {id(one): found for one in prefill if (found := _alone(one, decode))}
    if all(id(one) in lonely for one in placed):
        yield error(
            "no-pair",
            "cluster",
            "No prefill engine and decode engine fit one another: every turn is computed by one engine, or cold.",
            "Make one side like the other; what differs is said below.",
        )
    # Where a whole side has no partner, saying it once for each decode engine is enough.
    for one in decode if all(id(one) in lonely for one in decode) else [*decode, *prefill]:
        if id(one) in lonely:
            yield lonely[id(one)]


def _alone(one: _Placed, others: Sequence[_Placed]) -> Finding | None:
    """Returns what keeps an engine from all others; None where one fits."""
    serving = [other for other in others if set(one.node.models) & set(other.node.models)]
    subject = one.node.node_id
    if not serving:
        names, theirs = _names(one.node.models), _names({name for other in others for name in other.node.models})
        return error(
            "models-differ",
            subject,
            f"No {others[0].node.role} node serves what this one does: {names} here, {theirs} there.",
            "Give both sides the same --served-model-name.",
        )
    differences = [(other, _difference(one.engine, other.engine)) for other in serving]
    if any(difference is None for _, difference in differences):
        return None
    known = [(other, difference) for other, difference in differences if difference is not None]
    checks = Counter(difference.check for _, difference in known)
    other, difference = next(pair for pair in known if pair[1].check == checks.most_common(1)[0][0])
    return error(
        difference.check,
        subject,
        f"No {other.node.role} engine can exchange blocks with it: {difference.what} at {other.node.node_id}.",
        difference.fix,
    )


def _difference(one: Engine, other: Engine) -> _Difference | None:
    """Returns the difference that explains most; None where there is none, as far as is known.

    The same facts as those by which routers pair engines (`core/routing/compatibility.py`).
    """
    return next((found for found in _differences(one, other) if found is not None), None)


def _differences(one: Engine, other: Engine) -> Iterator[_Difference | None]:
    # Another version may well have another hash: said first, it explains the rest.
    yield _unequal(
        "versions-differ",
        "connector version",
        one.connector_version,
        other.connector_version,
        "Install the same connector on both sides and restart vLLM: what one version retained another does not read.",
    )
    hashes = one.compatibility_hash, other.compatibility_hash
    if _differ(*hashes):
        yield _unequal(
            "versions-differ",
            "vLLM version",
            one.vllm_version,
            other.vllm_version,
            "Run the same vLLM version on both sides: NIXL's handshake refuses others.",
        )
    yield _unequal(
        "block-sizes-differ",
        "block size",
        one.block_size,
        other.block_size,
        "Start both sides with the same --block-size.",
    )
    yield _unequal_digests(
        "weights-differ",
        "weights digest",
        one.weights_digest,
        other.weights_digest,
        "Serve the same revision of the weights on both sides (--revision): vLLM itself would not notice, and mix "
        "them.",
    )
    if not _sizes_fit(one, other):
        yield _Difference(
            "tensor-parallel-differs",
            f"tensor-parallel size {one.tp_size} here, {other.tp_size}",
            "Choose equal sizes, or sizes of which one divides the other, and of which the larger is no more than the "
            "model has KV heads.",
        )
    yield _unequal_digests(
        "layouts-differ",
        "NIXL compatibility hash",
        *hashes,
        "Start both with the same model, --dtype, --kv-cache-dtype, attention backend and KV layout.",
    )


def _unequal(check: str, name: str, one: str | int, other: str | int, fix: str) -> _Difference | None:
    return _Difference(check, f"{name} {one} here, {other}", fix) if _differ(one, other) else None


def _unequal_digests(check: str, name: str, one: str, other: str, fix: str) -> _Difference | None:
    """Shows the beginnings of digests; all of them where these are alike, as of two names."""
    length = _SHOWN if one[:_SHOWN] != other[:_SHOWN] else None
    return _unequal(check, name, one[:length], other[:length], fix)


def _differ(one: str | int, other: str | int) -> bool:
    """Tells whether both are known, and different."""
    return bool(one) and bool(other) and one != other


def _sizes_fit(one: Engine, other: Engine) -> bool:
    """Tells whether each can read from the other: a hand-off goes one way, what is reused the other.

    By the routers' rule (`core/tensor_parallel.py`): with fewer ranks than its source a reader cannot take heads that
    the source holds more than once. 0 is unknown, and fits.
    """
    less, more = sorted((one.tp_size, other.tp_size))
    heads = one.kv_head_count or other.kv_head_count
    return not less or less == more or (more % less == 0 and not 0 < heads < more)


def _names(models: Iterable[str]) -> str:
    return ", ".join(sorted(models)) or "nothing"
