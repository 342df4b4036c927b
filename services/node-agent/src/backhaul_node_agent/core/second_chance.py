"""Second chances: pointers to what an engine merely may still cache, and when it is not asked for it.

A set that was released for want of room, or that nobody came back for in time, often lives on in the engine's own
prefix cache. A *cached pointer* says so in the registry. What an engine without Backhaul's connector was given to
compute is known by the label that its events repeat. Both are guesses: they grow old, and one that is proved wrong is
dropped. Of what a label leads to nobody knows the tokens: it can only grow old.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from backhaul_connector import wire
from backhaul_connector.anchors import Anchors, verified_count
from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.bounds import MAX_SET_ID_BYTES
from backhaul_node_agent.core.retention.conversations import covers

PREFIX = "cached-"
"""Begins the set ids of cached pointers."""

LEAST_TOKENS = 256
"""Fewer cached tokens are not worth a request to the engine."""

LABEL = "backhaul"
"""Begins the labels that routers give to turns on engines without the connector: ``backhaul:<scope>:<key>[:<key>]``."""

MAX_POINTERS = 2_000
"""Cached pointers of one engine; beyond it the oldest go. The registry's leases have room for 10,000 keys."""

_MAX_LABEL_KEYS = 4
_NAME = re.compile(wire.NAME.replace(":", ""))
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 300.0


def enough(cached_count: int, pointer_count: int) -> bool:
    """Tells whether so many cached tokens are worth asking for, by what the pointer says (0: it does not say)."""
    return cached_count >= max(LEAST_TOKENS, (pointer_count + 1) // 2)


def evicted(pointer: BlockSet, identity: bytes, token_ids: Sequence[int], cached_count: int, block_size: int) -> bool:
    """Tells whether blocks of what a pointer leads to are gone for certain: a prompt shares more than is cached of it.

    Another prompt under the same key (the request for a title, a history that was edited) says nothing of them.
    """
    if not pointer.anchors or pointer.identity != identity:
        return False
    anchors = Anchors(identity, pointer.stride, pointer.spacing, pointer.token_count, pointer.anchors)
    # The block of a prompt's last token never counts as cached.
    shared = verified_count(anchors, token_ids[:-1])
    return shared > cached_count and shared - cached_count >= block_size


def cached_pointer(held: BlockSet) -> BlockSet | None:
    """Returns the pointer to what is left of a set; None when its name has no room for it."""
    set_id = PREFIX + held.set_id
    if len(set_id.encode()) > MAX_SET_ID_BYTES:
        return None
    return replace(held, set_id=set_id, params={}, block_ids=(), cached=True)


def labelled_pointer(label: str) -> BlockSet | None:
    """Returns the pointer to what a labelled turn leaves in the cache; None for a label that is not ours."""
    name, *parts = label.split(":")
    if name != LABEL or not 2 <= len(parts) <= 1 + _MAX_LABEL_KEYS or not all(map(_NAME.fullmatch, parts)):
        return None
    return BlockSet(
        set_id=PREFIX + hashlib.blake2b(label.encode(), digest_size=16).hexdigest(),
        scope=parts[0],
        keys=tuple(dict.fromkeys(parts[1:])),
        params={},
        token_count=0,
        block_count=0,
        identity=b"",
        stride=0,
        spacing=0,
        anchors=b"",
        cached=True,
    )


class CachedPointers:
    """The cached pointers of one engine, the oldest first."""

    def __init__(self, *, most: int = MAX_POINTERS) -> None:
        self._most = most
        self._known: OrderedDict[str, tuple[BlockSet, float]] = OrderedDict()
        self._by_key: dict[tuple[str, str], set[str]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, set_id: str) -> BlockSet | None:
        """Returns a pointer that is known."""
        found = self._known.get(set_id)
        return found[0] if found else None

    def add(self, pointer: BlockSet, now: float) -> tuple[bool, list[BlockSet]]:
        """Takes a pointer, or makes a known one young again; returns whether it is new, and which ones go for it."""
        new = self.drop(pointer.set_id) is None
        self._known[pointer.set_id] = pointer, now
        for key in pointer.keys:
            self._by_key.setdefault((pointer.scope, key), set()).add(pointer.set_id)
        return new, [self._drop_oldest() for _ in range(len(self._known) - self._most)]

    def drop(self, set_id: str) -> BlockSet | None:
        """Forgets a pointer; returns it when it was known."""
        if set_id not in self._known:
            return None
        pointer, _ = self._known.pop(set_id)
        for key in pointer.keys:
            same = self._by_key[pointer.scope, key]
            same.remove(set_id)
            if not same:
                del self._by_key[pointer.scope, key]
        return pointer

    def aged(self, born_before: float) -> list[BlockSet]:
        """Forgets and returns those that were last added before then."""
        gone: list[BlockSet] = []
        while self._known and next(iter(self._known.values()))[1] < born_before:
            gone.append(self._drop_oldest())
        return gone

    def superseded(self, newer: BlockSet) -> list[BlockSet]:
        """Forgets and returns those that a set which the engine retains now stands in for."""
        keys = (*newer.keys, *newer.continues)
        near = {set_id for key in keys for set_id in self._by_key.get((newer.scope, key), ())}
        gone = [self._known[set_id][0] for set_id in near if _stands_in(newer, self._known[set_id][0])]
        for pointer in gone:
            self.drop(pointer.set_id)
        return gone

    def _drop_oldest(self) -> BlockSet:
        oldest = self.drop(next(iter(self._known)))
        assert oldest is not None
        return oldest


def _stands_in(newer: BlockSet, older: BlockSet) -> bool:
    """Tells whether a set stands in for a pointer under one of its keys: by proof, else by the keys."""
    return covers(newer, older) if older.anchors else set(newer.keys).issuperset(older.keys)


@dataclass(slots=True)
class Backoff:
    """How long an engine is not asked after guesses that were wrong: a second, then twice as long each time."""

    failures: int = 0
    until: float = 0.0

    def over(self, now: float) -> bool:
        """Tells whether the engine may be asked."""
        return now >= self.until

    def wrong(self, now: float) -> None:
        """Notes a wrong guess; those that were under way when a pause began are part of the one that began it."""
        if not self.over(now):
            return
        self.until = now + min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self.failures, 16))
        self.failures += 1

    def right(self) -> None:
        """Notes a guess that was right."""
        self.failures = 0
