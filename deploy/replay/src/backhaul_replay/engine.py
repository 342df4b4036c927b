"""A decode engine in virtual time, on the simulated engine's memory: requests wait for blocks, run, and give way.

First come, first served; a request gets blocks for its whole prompt, then one by one for its answer; when they lack,
the latest running one gives way and is computed anew (as in ``backhaul_simulator.scheduler``). How many run at once is
limited by memory alone.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from backhaul_replay.clock import Clock
from backhaul_replay.hardware import Hardware
from backhaul_simulator.pool import BlockPool
from backhaul_simulator.prefix_cache import BlockManager


class History:
    """The blocks of one conversation: what is in the n-th one is the same in all its turns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._hashes: list[bytes] = []

    def rewritten(self) -> "History":
        """Returns that of the conversation after its history was cut or edited: no block is as before."""
        return History(f"{self.name}'")

    def hashes(self, count: int) -> list[bytes]:
        """Returns at least ``count`` hashes."""
        for index in range(len(self._hashes), count):
            self._hashes.append(f"{self.name}/{index}".encode())
        return self._hashes


@dataclass(slots=True, eq=False)
class Request:
    """A turn at the decode engine; after its end, what it retains."""

    history: History
    prompt_tokens: int
    output_tokens: int
    ended: Callable[["Request"], None]
    """Called at its end; the blocks are the callee's then."""
    num_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    delayed: bool = False
    """Whether it ever waited for blocks while some were retained."""
    runs: int = 0
    """How often it got its blocks."""

    @property
    def decoded(self) -> int:
        """Tokens of the answer so far."""
        return self.num_tokens - self.prompt_tokens

    def block_hashes(self, count: int) -> list[bytes]:
        """Returns the hashes of at least its first ``count`` full blocks."""
        return self.history.hashes(count)


class Manager(Protocol):
    """What is used of the simulated engine's ``BlockManager``; it uses three attributes of a request."""

    def find(self, request: Request) -> list[int]:
        """Returns the cached blocks of the request's start."""
        ...

    def allocate(self, request: Request, token_count: int, *, cached: list[int] | None = None, cache: bool) -> bool:
        """Gives a request blocks for its first ``token_count`` tokens; False when they lack."""
        ...

    def cache(self, request: Request, token_count: int) -> None:
        """Makes the request's full blocks known to the prefix cache."""
        ...

    def free(self, request: Request) -> None:
        """Takes all blocks from a request."""
        ...


@dataclass(slots=True)
class Tally:
    """What the engine counts of its memory."""

    pinned_block_s: float = 0.0
    peak_pinned: int = 0
    delayed: int = 0
    """Requests that waited for blocks while some were retained, whether or not these would have sufficed."""
    delayed_s: float = 0.0
    waited_s: float = 0.0
    """All waiting for blocks."""
    preemptions: int = 0


class Engine:
    """One decode engine."""

    def __init__(self, hardware: Hardware, clock: Clock, *, changed: Callable[[], None]) -> None:
        """``changed`` is called whenever memory was taken or freed, or is waited for."""
        # Block 0 is the null block, which nobody gets.
        self._pool = BlockPool(block_count=hardware.block_count + 1, block_size=hardware.block_size)
        # Its tokens, salt and session are for KV events, which nobody follows here.
        self._manager = cast(Manager, BlockManager(self._pool))
        self._hardware = hardware
        self._clock = clock
        self._changed = changed
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._counted_at = 0.0
        self.pinned = 0
        """Blocks that ended requests hold."""
        self.tally = Tally()

    @property
    def free_count(self) -> int:
        """Blocks that a request can have at once."""
        return self._pool.free_count

    @property
    def waiting_count(self) -> int:
        """Blocks that requests wait for."""
        return sum(self._blocks(request.num_tokens) for request in self._waiting)

    def submit(self, request: Request) -> None:
        """Takes a request whose prompt the prefill engine has computed."""
        self.count()
        request.num_tokens = request.prompt_tokens
        self._waiting.append(request)
        self._admit()

    def release(self, request: Request) -> None:
        """Frees what an ended request retains."""
        self.count()
        self.pinned -= len(request.block_ids)
        self._manager.free(request)
        self._admit()

    def cached(self, request: Request) -> list[int]:
        """Returns the blocks of a request's start that the prefix cache still has."""
        return self._manager.find(request)

    def hold(self, block_ids: list[int]) -> None:
        """Adds a reference to cached blocks while they are read."""
        self.count()
        self._pool.touch(block_ids)
        self._changed()

    def drop(self, block_ids: list[int]) -> None:
        """Takes that reference away."""
        self.count()
        self._pool.free(block_ids)
        self._admit()

    def count(self) -> None:
        """Counts the time since the last change."""
        passed_s = self._clock.now - self._counted_at
        self._counted_at = self._clock.now
        if not passed_s:
            return
        tally = self.tally
        tally.pinned_block_s += passed_s * self.pinned
        tally.peak_pinned = max(tally.peak_pinned, self.pinned)
        tally.waited_s += passed_s * len(self._waiting)
        if self.pinned and self._waiting:
            tally.delayed_s += passed_s * len(self._waiting)
            for request in self._waiting:
                tally.delayed += not request.delayed
                request.delayed = True

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            found = self._manager.find(request)
            if not self._manager.allocate(request, request.num_tokens, cached=found, cache=False):
                break
            self._waiting.popleft()
            request.runs += 1
            missing = request.num_tokens - len(found) * self._hardware.block_size
            speed = self._hardware.transfer_tokens_per_s if request.runs == 1 else self._hardware.prefill_tokens_per_s
            self._later(missing / speed, request, self._loaded)
        self._changed()

    def _loaded(self, request: Request) -> None:
        self._manager.cache(request, request.num_tokens)
        self._running.append(request)
        self._decode(request)

    def _decode(self, request: Request) -> None:
        """Goes on until the answer ends or the last block is full."""
        room = len(request.block_ids) * self._hardware.block_size - request.num_tokens
        count = min(request.output_tokens - request.decoded, room)
        if count:
            self._later(count * self._hardware.decode_step_s, request, lambda _: self._decoded(request, count))
        elif self._grow(request):
            self._decode(request)

    def _decoded(self, request: Request, count: int) -> None:
        self.count()
        request.num_tokens += count
        if request.decoded < request.output_tokens:
            self._decode(request)
            return
        self._running.remove(request)
        # The last token was not computed.
        request.num_tokens -= 1
        self._manager.cache(request, request.num_tokens)
        self.pinned += len(request.block_ids)
        request.ended(request)
        self._changed()

    def _grow(self, request: Request) -> bool:
        """Gives a running request one more block; False when it had to give way itself."""
        self.count()
        while not self._manager.allocate(request, request.num_tokens + 1, cache=False):
            victim = self._running.pop()
            self.tally.preemptions += 1
            self._manager.free(victim)
            victim.runs += 1
            self._waiting.appendleft(victim)
            if victim is request:
                self._changed()
                return False
        self._changed()
        return True

    def _later(self, delay_s: float, request: Request, action: Callable[[Request], None]) -> None:
        """Does something with a request unless it has given way until then."""
        runs = request.runs

        def act() -> None:
            if request.runs == runs:
                action(request)

        self._clock.after(delay_s, act)

    def _blocks(self, token_count: int) -> int:
        return -(-token_count // self._hardware.block_size)
