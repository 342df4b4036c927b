"""Values in etcd: one byte of schema version, then the API's message.

Scope, lookup key and set of a pointer are in its key; its value does not say them again.

A value that cannot be read (another version, garbage, a record that contradicts its key) counts as absent. It is logged
once, and never stops anything else.
"""

from collections import OrderedDict

import structlog
from google.protobuf.message import DecodeError

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.errors import BackhaulError
from backhaul_common.etcd import KeyValue
from backhaul_registry import convert
from backhaul_registry.core import rules
from backhaul_registry.core.model import Node, Pointer
from backhaul_registry.keys import Keys

_log = structlog.get_logger(__name__)

_NODE = b"\x01"
_POINTER = b"\x02"
"""\x01 was a pointer that said twice what its key says."""
_REMEMBERED = 1_000
_UNREADABLE = (ValueError, DecodeError, BackhaulError)


class Records:
    """Writes and reads the values of one cluster."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        # Bounded: forgetting one costs a second log line.
        self._logged: OrderedDict[tuple[bytes, int], None] = OrderedDict()

    def write_node(self, node: Node) -> bytes:
        """Returns the value of a node's record."""
        return _NODE + convert.node_to_proto(node).SerializeToString()

    def write_pointer(self, pointer: Pointer) -> bytes:
        """Returns the value of a pointer."""
        return _POINTER + convert.facts_to_proto(pointer).SerializeToString()

    def read_node(self, kv: KeyValue) -> Node | None:
        """Reads a node's record; None when it cannot be read."""
        try:
            node = convert.node_from_proto(pb.Node.FromString(_body(kv.value, _NODE)))
            rules.check_node(node)
            _check_key(kv.key, self._keys.node(node.node_id))
        except _UNREADABLE as error:
            self._report(kv, error)
            return None
        return node

    def read_pointer(self, kv: KeyValue) -> Pointer | None:
        """Reads a pointer; None when it cannot be read."""
        try:
            message = pb.BlockSetPointer.FromString(_body(kv.value, _POINTER))
            if message.scope or message.key or message.set_id:
                raise ValueError("only its key says which pointer it is")
            said = self._keys.pointer_id(kv.key)
            pointer = convert.facts_from_proto(message, scope=said.scope, key=said.key, set_id=said.set_id)
            rules.check_pointer(pointer)
        except _UNREADABLE as error:
            self._report(kv, error)
            return None
        return pointer

    def _report(self, kv: KeyValue, why: Exception) -> None:
        seen = (kv.key, kv.mod_revision)
        if seen in self._logged:
            return
        self._logged[seen] = None
        if len(self._logged) > _REMEMBERED:
            self._logged.popitem(last=False)
        _log.warning("unreadable record ignored", etcd_key=kv.key.decode(errors="replace"), problem=str(why))


def _check_key(found: bytes, expected: bytes) -> None:
    if found != expected:
        raise ValueError("the record belongs to another key")


def _body(value: bytes, version: bytes) -> bytes:
    if value[:1] != version:
        raise ValueError("unknown schema version")
    return value[1:]
