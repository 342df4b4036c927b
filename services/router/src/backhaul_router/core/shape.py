"""How deep and how manifold a client's JSON may be.

Bytes alone do not bound the work: a document of 16 MiB can be an object of a million messages, or nested so deeply that
it can be read but not be written again.
"""

from collections.abc import Iterable
from typing import Any

from backhaul_router.core.errors import invalid

MAX_DEPTH = 100
"""Objects and arrays inside one another. Schemas of tools, the deepest part of requests, have a dozen or two."""

MAX_NESTED = 50_000
"""Objects and arrays of one document: messages, their parts, schemas."""

_NESTED = frozenset((dict, list))


def check_shape(data: bytes, document: object) -> None:
    """Accepts a document, given as it came and as it was read. Raises ApiError (400)."""
    # Most have fewer brackets than they may have levels, in texts and all.
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    level, count = [document], 1
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _items(outer) if type(item) in _NESTED]
        count += len(level)
        if count > MAX_NESTED:
            raise invalid(f"the body has more than {MAX_NESTED} objects and arrays, which is this router's limit")
        if not level:
            return
    raise invalid(f"the body is nested more than {MAX_DEPTH} levels deep, which is this router's limit")


def _items(value: Any) -> Iterable[object]:
    items: Iterable[object] = value.values() if type(value) is dict else value
    return items
