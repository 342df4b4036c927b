"""What engines probably have in their prefix caches: what this router has sent them of late.

vLLM caches all full blocks of what it computes, and takes the block that was used least recently where it needs one;
of one prompt its end first (`v1/core/kv_cache_manager.py`, `free`). So a prompt's beginnings are kept as a chain, the
longer before the shorter, each with the tokens that it has more than the next shorter one.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from backhaul_router.core.routing.demand import Demand, Prefix
from backhaul_router.core.routing.target import Target, TargetKey

DEFAULT_CAPACITY = 100_000
"""Tokens of a KV cache whose size is unknown."""

MAX_ENTRIES = 8192
"""Beginnings remembered of one target; beyond it those used least recently are forgotten."""

MAX_PROMPTS = 131_072
"""Prompts of which it is remembered who had them last; beyond it the ones that were sent longest ago are forgotten."""

MAX_FAMILIAR = 6
"""Targets remembered of one prompt."""

MAX_TARGETS = 1024
"""Targets remembered; beyond it the one used least recently is forgotten."""

_THERE = 0.5
"""From which part of its estimated tokens on a beginning counts as found: estimates are rough."""


class _Cache:
    """Beginnings by key, least recently used first; each with its tokens beyond the next shorter one."""

    def __init__(self) -> None:
        self.tokens: OrderedDict[str, int] = OrderedDict()
        self._token_count = 0

    def put(self, prefixes: Sequence[Prefix], capacity: int) -> None:
        for prefix, more in _increments(prefixes):
            self._token_count += more - self.tokens.get(prefix.key, 0)
            self.tokens[prefix.key] = more
            self.tokens.move_to_end(prefix.key)
        while self._token_count > capacity or len(self.tokens) > MAX_ENTRIES:
            self._drop_oldest()

    def drop_through(self, key: str) -> None:
        """Drops a beginning and all that was used before it: whoever evicted it has evicted those too."""
        while key in self.tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._token_count -= self.tokens.popitem(last=False)[1]


class Prefixes:
    """Probable contents of the prefix caches of all targets."""

    def __init__(self) -> None:
        self._caches: OrderedDict[TargetKey, _Cache] = OrderedDict()
        self._had: dict[str, tuple[TargetKey, ...]] = {}
        """By whole prompts and by what most prompts begin with: who was sent them last, the latest first."""

    def note(self, target: Target, prefixes: Sequence[Prefix]) -> None:
        """A target has computed, or been given, a prompt with these beginnings: all of them are cached there now."""
        cache = self._caches.setdefault(target.key, _Cache())
        self._caches.move_to_end(target.key)
        cache.put(prefixes, _capacity(target))
        self._note_had(target.key, prefixes)
        if len(self._caches) > MAX_TARGETS:
            self._caches.popitem(last=False)

    def cached(self, key: TargetKey, prefixes: Sequence[Prefix]) -> int:
        """Returns the tokens of the longest of these beginnings that the target probably has; 0 for none."""
        cache = self._caches.get(key)
        if cache is None:
            return 0
        for prefix in prefixes:
            if prefix.key in cache.tokens:
                return prefix.token_count
        return 0

    def familiar(self, prefixes: Sequence[Prefix]) -> Iterator[TargetKey]:
        """Yields the targets that were sent one of these beginnings last, those with the longest first."""
        for prefix in prefixes:
            yield from self._had.get(prefix.key, ())

    def had(self, target: Target, demand: Demand) -> int:
        """Returns the tokens of a turn's prompt that a target has: held, or probably cached."""
        return max(demand.held_by(target), self.cached(target.key, demand.prefixes))

    def correct(self, target: Target, prefixes: Sequence[Prefix], *, local: int) -> None:
        """The engine has said how many tokens of a prompt it had cached.

        To be called before the prompt itself is noted: that it is cached now does not say that it was.
        """
        cache = self._caches.get(target.key)
        if cache is None:
            return
        for prefix in prefixes:
            if local < prefix.token_count * _THERE:
                cache.drop_through(prefix.key)

    def _note_had(self, key: TargetKey, prefixes: Sequence[Prefix]) -> None:
        for name in {prefix.key for prefix in (*prefixes[:1], *prefixes[-1:]) if prefix.key}:
            others = self._had.pop(name, ())
            self._had[name] = key, *[other for other in others if other != key][: MAX_FAMILIAR - 1]
        while len(self._had) > MAX_PROMPTS:
            del self._had[next(iter(self._had))]

    def forget(self, node_ids: Collection[str]) -> None:
        """Drops what is known of nodes other than these. Who had a prompt is forgotten with the prompt."""
        for key in [key for key in self._caches if key[0] not in node_ids]:
            del self._caches[key]


def _increments(prefixes: Sequence[Prefix]) -> Iterator[tuple[Prefix, int]]:
    """Returns each beginning that has a name, and its tokens beyond the next shorter one."""
    for prefix, shorter in pairwise((*(prefix for prefix in prefixes if prefix.key), Prefix("", 0))):
        yield prefix, max(prefix.token_count - shorter.token_count, 0)


def _capacity(target: Target) -> int:
    engine = target.engine
    return (engine.block_count * engine.block_size if engine else 0) or DEFAULT_CAPACITY
