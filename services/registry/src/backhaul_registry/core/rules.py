"""What the registry accepts. Everything that reaches an etcd key or value has passed here.

Every check raises InvalidArgumentError with the reason named at it and the field in the metadata.
"""

import re
from collections.abc import Sequence

from backhaul_common.errors import InvalidArgumentError
from backhaul_registry.core.model import Engine, Node, Pointer, PointerId

MAX_KEYS = 16
"""Lookup keys of one search."""

MAX_POINTERS_PER_KEY = 16
"""Pointers that a search returns for one key."""

MAX_BATCH = 1_000
"""Pointers to write, and pointers to remove, in one batch."""

MAX_NODE_BYTES = 64 * 1024
"""Size of a node's record; etcd takes up to 1.5 MiB (server/embed/config.go, DefaultMaxRequestBytes)."""

DEFAULT_PAGE = 500
MAX_PAGE = 5_000

MIN_TTL_S = 2.0
MAX_TTL_S = 60.0
DEFAULT_TTL_S = 10.0

_MAX_SET_ID_BYTES = 256
_MAX_TEXT_BYTES = 1_024
_MAX_ITEMS = 256
_DIGEST_BYTES = 16

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def check_id(value: str, field: str) -> None:
    """Accepts 1 to 128 of the characters [A-Za-z0-9._:-] (ID_INVALID)."""
    if not _ID.fullmatch(value):
        raise InvalidArgumentError(
            "ID_INVALID", f"{field} must be 1 to 128 of the characters [A-Za-z0-9._:-]", field=field
        )


def check_keys(scope: str, keys: Sequence[str]) -> None:
    """Accepts 1 to 16 different lookup keys of one scope (KEY_LIMIT, KEY_REPEATED, ID_INVALID)."""
    check_id(scope, "scope")
    if not 1 <= len(keys) <= MAX_KEYS:
        raise InvalidArgumentError("KEY_LIMIT", f"1 to {MAX_KEYS} keys, not {len(keys)}", field="keys")
    if len(set(keys)) < len(keys):
        raise InvalidArgumentError("KEY_REPEATED", "keys must differ", field="keys")
    for key in keys:
        check_id(key, "keys")


def check_pointer_id(pointer: PointerId | Pointer) -> None:
    """Accepts what can stand in a key (ID_INVALID)."""
    check_id(pointer.scope, "scope")
    check_id(pointer.key, "key")
    if not 1 <= len(pointer.set_id.encode()) <= _MAX_SET_ID_BYTES:
        raise InvalidArgumentError("ID_INVALID", f"set_id must have 1 to {_MAX_SET_ID_BYTES} bytes", field="set_id")


def check_pointer(pointer: Pointer) -> None:
    """Accepts a whole pointer (ID_INVALID, POINTER_INVALID); a cached one need not say what it covers."""
    check_pointer_id(pointer)
    check_text(pointer.engine_id, "engine_id", required=True)
    check_id(pointer.node_id, "node_id")
    field = _unsound(pointer)
    if field:
        raise InvalidArgumentError("POINTER_INVALID", f"{field} is missing or wrong", field=field)


def _unsound(pointer: Pointer) -> str:
    """Returns a field that says what no pointer can say, empty for none."""
    cached = pointer.cached
    if pointer.token_count <= 0 and not (cached and pointer.token_count == 0):
        return "token_count"
    if pointer.stride <= 0 and not (cached and pointer.stride == 0):
        return "stride"
    if len(pointer.digest) != _DIGEST_BYTES and not (cached and not pointer.digest):
        return "digest"
    if len(pointer.identity) != _DIGEST_BYTES and not (cached and not pointer.identity):
        return "identity"
    return "traceparent" if pointer.traceparent and not _TRACEPARENT.fullmatch(pointer.traceparent) else ""


def check_batch(upserts: Sequence[Pointer], removals: Sequence[PointerId]) -> None:
    """Accepts a batch of sound pointers (BATCH_LIMIT and those of its pointers)."""
    if max(len(upserts), len(removals)) > MAX_BATCH:
        raise InvalidArgumentError("BATCH_LIMIT", f"at most {MAX_BATCH} pointers", limit=str(MAX_BATCH))
    for pointer in upserts:
        check_pointer(pointer)
    for removal in removals:
        check_pointer_id(removal)


def check_node_size(size_bytes: int) -> None:
    """Accepts a record of up to 64 KiB (NODE_TOO_LARGE)."""
    if size_bytes > MAX_NODE_BYTES:
        raise InvalidArgumentError(
            "NODE_TOO_LARGE", f"a node's record has at most {MAX_NODE_BYTES} bytes", limit=str(MAX_NODE_BYTES)
        )


def check_node(node: Node) -> None:
    """Accepts a node's record (ID_INVALID, NODE_INVALID)."""
    check_id(node.node_id, "node_id")
    check_id(node.session, "session")
    check_text(node.agent_address, "agent_address", required=True)
    check_text(node.engine_url, "engine_url", required=True)
    check_text(node.state_reason, "state_reason")
    if max(len(node.models), len(node.engines)) > _MAX_ITEMS:
        raise InvalidArgumentError("NODE_INVALID", f"at most {_MAX_ITEMS} models and engines", field="models")
    for model in node.models:
        check_text(model, "models", required=True)
    for engine in node.engines:
        _check_engine(engine)
    if len({engine.engine_id for engine in node.engines}) < len(node.engines):
        raise InvalidArgumentError("NODE_INVALID", "engine ids must differ", field="engines")


def _check_engine(engine: Engine) -> None:
    check_text(engine.engine_id, "engine_id", required=True)
    for field in ("compatibility_hash", "weights_digest", "connector_version", "reuse_problem", "vllm_version"):
        check_text(getattr(engine, field), field)
    numbers = (engine.rank, engine.block_size, engine.block_count, engine.tp_size, engine.kv_head_count)
    if min(*numbers, engine.retention_ttl_s) < 0:
        raise InvalidArgumentError("NODE_INVALID", "numbers of an engine must not be negative", field="engines")


def check_text(value: str, field: str, *, required: bool = False) -> None:
    """Accepts text of up to 1,024 bytes (TEXT_INVALID)."""
    if len(value.encode()) > _MAX_TEXT_BYTES or (required and not value):
        low = 1 if required else 0
        raise InvalidArgumentError("TEXT_INVALID", f"{field} must have {low} to {_MAX_TEXT_BYTES} bytes", field=field)


def lease_ttl_s(wanted_s: float | None) -> float:
    """Returns the TTL to grant; 10 s when none is wanted (TTL_INVALID outside 2 s to 60 s)."""
    if wanted_s is None:
        return DEFAULT_TTL_S
    if not MIN_TTL_S <= wanted_s <= MAX_TTL_S:
        raise InvalidArgumentError("TTL_INVALID", f"ttl must be {MIN_TTL_S:g} s to {MAX_TTL_S:g} s", field="ttl")
    return wanted_s


def page_size(wanted: int) -> int:
    """Returns the number of items of a page; 500 for 0 (PAGE_SIZE_INVALID above 5,000 or below 0)."""
    if not 0 <= wanted <= MAX_PAGE:
        raise InvalidArgumentError("PAGE_SIZE_INVALID", f"page_size must be 0 to {MAX_PAGE}", field="page_size")
    return wanted or DEFAULT_PAGE
