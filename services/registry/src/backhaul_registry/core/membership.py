"""Who may hold a node's record.

    stored record                        join                keep alive, update
    ─────────────────────────────────────────────────────────────────────────────
    none                                 create              create
    unreadable, or without a lease       replace             lease lost
    same lease                           replace             replace
    same session, other lease            replace, and end    lease lost
                                         the other lease
    other session                        node taken          lease lost

A write happens only if the record is still the one that was decided upon; otherwise the decision is made again.
"""

from dataclasses import dataclass

from backhaul_common.errors import AbortedError, AlreadyExistsError
from backhaul_registry.core.model import Node


@dataclass(frozen=True, slots=True)
class Stored:
    """A node's record as it is in the store."""

    node: Node | None
    """None when the record cannot be read."""
    lease_id: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Create:
    """Write the record if there is none."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Write the record if it is still at ``mod_revision``."""

    mod_revision: int
    superseded_lease_id: int = 0
    """Lease of the same session's earlier stream, to be ended; 0 for none."""


Write = Create | Replace


def decide_join(stored: Stored | None, node: Node, lease_id: int) -> Write:
    """Decides how a joining node gets its record. Raises AlreadyExistsError (NODE_TAKEN)."""
    if stored is None:
        return Create()
    if stored.node is None or stored.lease_id in (0, lease_id):
        return Replace(stored.mod_revision)
    if stored.node.session == node.session:
        return Replace(stored.mod_revision, superseded_lease_id=stored.lease_id)
    raise AlreadyExistsError("NODE_TAKEN", "another session holds the node", node_id=node.node_id)


def decide_keep(stored: Stored | None, node: Node, lease_id: int) -> Write:
    """Decides how a joined node keeps its record. Raises AbortedError (LEASE_LOST)."""
    if stored is None:
        return Create()
    if stored.lease_id == lease_id:
        return Replace(stored.mod_revision)
    raise AbortedError("LEASE_LOST", "the node's record is no longer under this lease", node_id=node.node_id)
