"""An engine in virtual time: steps of limited tokens, a prefix cache, reads of others' blocks.

What the engine simulator does with real requests (`backhaul_simulator.scheduler`), counted only.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.routing.clusters import BLOCK_SIZE, Speed
from tests.fakes.virtual_time import Signal, World

_LEAST_READ = 64
"""Fewer tokens are computed rather than read (``kv_recompute_threshold``)."""


@dataclass(frozen=True, slots=True)
class Content:
    """A prompt: a beginning that others share, and what is this conversation's own."""

    conversation: str
    system: str
    system_tokens: int
    token_count: int

    def blocks(self, token_count: int) -> Iterator[tuple[str, int]]:
        """Returns the names of its full blocks, as far as so many tokens reach."""
        shared = self.system_tokens // BLOCK_SIZE
        for index in range(token_count // BLOCK_SIZE):
            yield (self.system if index < shared else self.conversation), index


@dataclass(slots=True)
class Request:
    """One leg at an engine."""

    content: Content
    answer_tokens: int
    remote_tokens: int
    """Of the prompt, that can be read from another engine."""
    first: Signal
    """Its first token is there."""
    done: Signal
    local_tokens: int = 0
    read_tokens: int = 0
    computed: int = 0
    answered: int = 0

    @property
    def left(self) -> int:
        """Tokens to compute until the next one of the answer is there."""
        return self.content.token_count + self.answered - self.computed


@dataclass(slots=True)
class _Queues:
    waiting: deque[Request] = field(default_factory=deque)
    loading: list[Request] = field(default_factory=list)
    loaded: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)


class VirtualEngine:
    """One engine."""

    def __init__(self, world: World, speed: Speed, *, transfer_block_s: float) -> None:
        self._world = world
        self._speed = speed
        self._transfer_block_s = transfer_block_s
        self._cached: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._queues = _Queues()
        self._stepping = False

    @property
    def running(self) -> int:
        """Requests that it computes for."""
        return len(self._queues.running)

    @property
    def waiting(self) -> int:
        """Requests that it has not begun with."""
        queues = self._queues
        return len(queues.waiting) + len(queues.loading) + len(queues.loaded)

    def serve(self, content: Content, *, answer_tokens: int = 1, remote_tokens: int = 0) -> Request:
        """Takes a request."""
        world = self._world
        request = Request(content, answer_tokens, remote_tokens, Signal(world), Signal(world))
        self._queues.waiting.append(request)
        self._step()
        return request

    def _step(self) -> None:
        """Begins a step, unless one is under way or there is nothing to do."""
        if self._stepping:
            return
        decodes = any(request.answered for request in self._queues.running)
        planned = self._planned()
        if not planned:
            return
        prompt_tokens = sum(count for request, count in planned if not request.answered)
        duration_s = prompt_tokens / self._speed.prefill_tokens_per_s + (self._speed.decode_step_s if decodes else 0.0)
        self._stepping = True
        self._world.after(duration_s, lambda: self._end_step(planned))

    def _planned(self) -> list[tuple[Request, int]]:
        """Running requests come first, then those whose reads have ended, then those that wait."""
        budget = self._speed.step_tokens
        planned: list[tuple[Request, int]] = []
        for request in self._queues.running:
            count = min(request.left, budget)
            budget -= count
            planned.append((request, count))
        while budget > 0 and (admitted := self._next()):
            self._queues.running.append(admitted)
            count = min(admitted.left, budget)
            budget -= count
            planned.append((admitted, count))
        return [(request, count) for request, count in planned if count]

    def _next(self) -> Request | None:
        queues = self._queues
        if queues.loaded:
            return queues.loaded.popleft()
        while queues.waiting:
            request = queues.waiting.popleft()
            if not self._reads(request):
                return request
        return None

    def _reads(self, request: Request) -> bool:
        """Looks up what is cached; tells whether the rest is being read first."""
        request.local_tokens = request.computed = self._found(request.content)
        lacks = request.remote_tokens - request.local_tokens
        if lacks < min(_LEAST_READ, request.content.token_count - request.local_tokens):
            return False
        request.read_tokens = lacks
        self._queues.loading.append(request)
        block_count = -(-request.remote_tokens // BLOCK_SIZE) - request.local_tokens // BLOCK_SIZE
        self._world.after(block_count * self._transfer_block_s, lambda: self._loaded(request))
        return True

    def _loaded(self, request: Request) -> None:
        # The last token is computed anew: the next one comes from it.
        request.computed = min(request.remote_tokens, request.content.token_count - 1)
        self._queues.loading.remove(request)
        self._queues.loaded.append(request)
        self._step()

    def _end_step(self, planned: list[tuple[Request, int]]) -> None:
        self._stepping = False
        for request, count in planned:
            request.computed += count
            if not request.left:
                self._answer(request)
        self._queues.running = [request for request in self._queues.running if request.done.at is None]
        self._step()

    def _answer(self, request: Request) -> None:
        request.answered += 1
        if request.answered == 1:
            self._cache(request)
            request.first.set()
        if request.answered == request.answer_tokens:
            self._cache(request)
            request.done.set()

    def _found(self, content: Content) -> int:
        found = 0
        for name in content.blocks(content.token_count - 1):
            if name not in self._cached:
                break
            found += BLOCK_SIZE
        return found

    def _cache(self, request: Request) -> None:
        """The last blocks of a request are evicted first."""
        for name in reversed([*request.content.blocks(request.computed)]):
            self._cached[name] = None
            self._cached.move_to_end(name)
        while len(self._cached) > self._speed.block_count:
            self._cached.popitem(last=False)
