"""All key formats in etcd.

    /{cluster}/nodes/{node_id}                     a node's record, under the node's lease
    /{cluster}/index/{scope}/{key}/{set_id}        a pointer, under a lease of its publish stream
    /{cluster}/streams/{stream_id}                 the last batch of a publish stream, under its first lease

Every part has passed `core.rules`; set ids, which engines choose, are percent-encoded.
"""

import re
from urllib.parse import quote, unquote

from backhaul_registry.core.model import Pointer, PointerId

_PLAIN = re.compile(r"[A-Za-z0-9_.~-]*")
"""What is encoded as itself, which takes a while to find out for `quote`."""


class Keys:
    """Keys of one cluster."""

    def __init__(self, cluster: str) -> None:
        self.nodes = f"/{cluster}/nodes/".encode()
        """Prefix of all nodes."""
        self._index = f"/{cluster}/index/"
        self.index = self._index.encode()
        """Prefix of all pointers."""
        self._streams = f"/{cluster}/streams/".encode()

    def node(self, node_id: str) -> bytes:
        """Key of a node's record."""
        return self.nodes + node_id.encode()

    def scope(self, scope: str) -> bytes:
        """Prefix of a scope's pointers; all pointers for an empty scope."""
        return self.index + f"{scope}/".encode() if scope else self.index

    def lookup(self, scope: str, key: str) -> bytes:
        """Prefix of the pointers under one lookup key."""
        return self.scope(scope) + f"{key}/".encode()

    def stream(self, stream_id: str) -> bytes:
        """Key of a publish stream."""
        return self._streams + stream_id.encode()

    def pointer(self, pointer: PointerId | Pointer) -> bytes:
        """Key of a pointer."""
        set_id = pointer.set_id if _PLAIN.fullmatch(pointer.set_id) else quote(pointer.set_id, safe="")
        return f"{self._index}{pointer.scope}/{pointer.key}/{set_id}".encode()

    def pointer_id(self, key: bytes) -> PointerId:
        """Returns what a pointer's key says. Raises ValueError for any other key."""
        parts = key.removeprefix(self.index).decode().split("/")
        if len(parts) != 3:
            raise ValueError("not the key of a pointer")
        scope, lookup, set_id = parts
        pointer = PointerId(scope, lookup, unquote(set_id, errors="strict"))
        if self.pointer(pointer) != key:
            raise ValueError("not the key of a pointer")
        return pointer
