"""One decode engine: what it retains, in memory that others use as soon as it is free, and its connector's records."""

import itertools
from collections.abc import Iterable, Sequence

from backhaul_connector import decode, wire
from backhaul_connector.anchors import identity_of
from backhaul_connector.leases import ConfirmedDeadlines, LeaseWatcher
from backhaul_connector.ledger import Ledger
from tests.fakes.block_sets import engine_params
from tests.model.clocks import Clock

BLOCK_SIZE = 32
SCOPE = "scope-1"
WEIGHTS = "weights"
IDENTITY = identity_of(weights_digest=WEIGHTS, adapter="", cache_salt="", scope=SCOPE)
HEARTBEAT_S = 120.0
"""A renewal moves a deadline to now + this, if that is later (two thirds of `kv_lease_duration`)."""
MAX_QUEUED = 3
BLOCK_COUNT = 10_000

_SOMEBODY_ELSES = (-1,) * BLOCK_SIZE


def kv_of(tokens: Sequence[int], identity: bytes = IDENTITY) -> list[int]:
    """Returns what the cache holds for each token: it depends on all tokens before, on weights and so on."""
    content, before = [], int.from_bytes(identity)
    for token in tokens:
        before = hash((before, token))
        content.append(before)
    return content


class DecodeEngine:
    """One incarnation."""

    def __init__(self, engine_id: str, clock: Clock) -> None:
        self.engine_id = engine_id
        self.clock = clock
        self.ledger = Ledger(max_queued=MAX_QUEUED)
        self.leases: dict[str, float] = {}
        """Request id to deadline: labelled turns, and hand-offs that are none of ours."""
        self.turns: dict[str, list[int]] = {}
        """Tokens of all labelled turns that were ever retained."""
        self.ended_at: dict[str, float] = {}
        """When they ended, by the engine's clock."""
        self.free_count = BLOCK_COUNT
        """Blocks that running requests leave."""
        self.caching = False
        """Whether what is retained already is retained in the same blocks again."""
        self._memory: dict[int, tuple[int, ...]] = {}
        self._numbers = itertools.count(1)
        """Of blocks; a history gives out fewer than there are."""
        self._blocks: dict[str, list[int]] = {}
        self._fresh: dict[str, float] = {}
        """Leases that the next step tells the worker of."""
        self._watcher = LeaseWatcher()
        self._confirmed = ConfirmedDeadlines(rank_count=1)

    @property
    def labelled(self) -> set[str]:
        """Labelled turns that are retained now."""
        return self.leases.keys() & self.turns.keys()

    def finish_turn(self, set_id: str, tokens: list[int], key: str, deadline: float, now: float) -> None:
        """Retains a labelled turn that ends now, and reports it. Of its last token nothing is in the cache yet."""
        label = decode.label_of({wire.PARAMS_KEY: {"scope": SCOPE, "keys": [key]}})
        assert label is not None
        shown = self.clock.at(now)
        turn = decode.opened(label, identity=IDENTITY, tokens=tokens, extras=(), block_size=BLOCK_SIZE, now=shown - 1.0)
        assert turn is not None
        self._retain(set_id, tokens[:-1], deadline)
        params = engine_params(
            set_id,
            len(tokens) - 1,
            BLOCK_SIZE,
            remote_block_ids=[self._blocks[set_id]],
            remote_engine_id=self.engine_id,
            remote_blocks_expiry_time=deadline,
        )
        assert turn.close(params, deadline, now=shown)
        turn.advance(len(tokens))
        self.turns[set_id] = tokens
        self.ended_at[set_id] = shown
        self.ledger.retained(turn.report())

    def retain_foreign(self, request_id: str, deadline: float) -> None:
        """Retains blocks for somebody who is no concern of ours."""
        self._retain(request_id, [0] * BLOCK_SIZE, deadline)

    def blocks_of(self, request_ids: Iterable[str]) -> set[int]:
        """Returns the blocks that leases pin, each once."""
        return {block for request_id in request_ids for block in self._blocks[request_id]}

    def read(self, block: int) -> tuple[int, ...]:
        """Returns what is in a block now, whoever asks."""
        return self._memory.get(block, _SOMEBODY_ELSES)

    def free(self, request_ids: Sequence[str]) -> None:
        """Frees blocks, which others use at once: on the first notification, whoever sends it."""
        freed = [request_id for request_id in request_ids if self.leases.pop(request_id, None) is not None]
        for request_id in freed:
            blocks = self._blocks.pop(request_id)
            for block in set(blocks) - self.blocks_of(self._blocks):
                del self._memory[block]
        if freed:
            self._confirmed.forget(freed)
            self.ledger.freed(freed)

    def renew(self, request_ids: Sequence[str], now: float) -> None:
        """Takes a heartbeat."""
        for request_id in request_ids:
            if request_id in self.leases:
                self.leases[request_id] = max(self.leases[request_id], self.clock.at(now) + HEARTBEAT_S)

    def step(self, now: float) -> None:
        """Runs one step: leases end, and the scheduler hears of those that moved."""
        shown = self.clock.at(now)
        self.free([request_id for request_id, deadline in self.leases.items() if shown >= deadline])
        self._watcher.stepped(shown, shown, self._fresh)
        self._fresh = {}
        self.ledger.deadlines(self._confirmed.update({0: self._watcher.changed(self.leases, shown)}))
        self.ledger.memory(wire.Memory(free_count=self.free_count, waiting_count=0))

    def _retain(self, request_id: str, tokens: list[int], deadline: float) -> None:
        content = kv_of(tokens)
        known = {kept: block for block, kept in self._memory.items()} if self.caching else {}
        self._blocks[request_id] = []
        for start in range(0, len(content), BLOCK_SIZE):
            kept = tuple(content[start : start + BLOCK_SIZE])
            block = known[kept] if kept in known else next(self._numbers)
            self._blocks[request_id].append(block)
            self._memory[block] = kept
        self.leases[request_id] = self._fresh[request_id] = deadline
