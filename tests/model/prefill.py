"""One prefill engine: proves handles, reads from the decode engine's memory block by block, and fences late reads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from backhaul_connector.fence import EndFence
from backhaul_connector.handles import USED, Handles
from backhaul_connector.prefill import Judgement, Layout, Prompt, judge, without_handle
from tests.model.clocks import Clock, RemoteClocks
from tests.model.engine import BLOCK_SIZE, DecodeEngine

_LAYOUT = Layout(BLOCK_SIZE, trims=True)
_MIN_VERIFIED = 64
_START_MARGIN_S = 5.0
"""vLLM's own look at the deadline (nixl/pull_worker.py, `_is_turn2_read_expired`)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a read goes."""

    wait_s: float = 0.0
    """In the queue, before it starts."""
    block_s: float = 0.01
    whole_hit: bool = False
    """Whether the engine has the whole prompt already: it notifies and reads nothing."""


@dataclass(slots=True)
class Read:
    """One leg whose handle was let through."""

    request_id: str
    params: dict[str, Any]
    prompt: list[int]
    identity: bytes
    pace: Pace
    next_at: float
    started: bool = False
    copied: list[int] = field(default_factory=list)
    copied_blocks: int = 0
    completed: bool = False

    @property
    def set_id(self) -> str:
        return str(self.params["remote_request_id"])

    @property
    def engine_id(self) -> str:
        return str(self.params["remote_engine_id"])

    @property
    def deadline(self) -> float:
        return float(self.params["remote_blocks_expiry_time"])

    @property
    def count(self) -> int:
        """Tokens that are used of what is read."""
        return min(int(self.params["remote_num_tokens"]), len(self.prompt))

    @property
    def blocks(self) -> list[int]:
        """Of a handle that is longer than the prompt vLLM reads the last blocks."""
        needed = -(-self.count // BLOCK_SIZE)
        return list(self.params["remote_block_ids"][0])[-needed:]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the connector says at once of a handle."""

    refused: str
    spent: bool


class PrefillEngine:
    """One incarnation. `started` and `used` are told of reads; `engine` is the decode engine as it is now."""

    def __init__(
        self,
        clock: Clock,
        clocks: RemoteClocks,
        *,
        engine: Callable[[], DecodeEngine],
        started: Callable[[Read], None],
        used: Callable[[Read], None],
    ) -> None:
        self.clocks = clocks
        self.reads: list[Read] = []
        self._clock = clock
        self._engine = engine
        self._started = started
        self._used = used
        self._handles = Handles(clocks)
        self._fence = EndFence(clocks)
        self._numbers = 0
        self._held: set[str] = set()

    def admit(self, params: dict[str, Any], prompt: list[int], identity: bytes, pace: Pace, now: float) -> Answer:
        """Takes a leg in (backhaul_connector.scheduler, `_admit_prefill`)."""
        self.clocks.step(now)
        judgement = judge(params, Prompt(prompt, (), identity), _LAYOUT, _MIN_VERIFIED)
        refused = judgement.refused
        if not refused and (refused := self._handles.refuses(judgement.params, self._clock.at(now))):
            judgement = Judgement(without_handle(params), judgement.verified, refused)
        if judgement.params["remote_block_ids"]:
            self._numbers += 1
            request_id = f"leg-{self._numbers}"
            self.reads.append(Read(request_id, judgement.params, prompt, identity, pace, now + pace.wait_s))
        return Answer(refused, spent=not refused or refused == USED)

    def step(self, now: float) -> None:
        """Lets reads go on, and judges those that are over (connector, `get_transfer_results`)."""
        self.clocks.step(now)
        going = [read for read in self.reads if read.completed or self._goes_on(read, now)]
        # A read that the clock holds back is named when that is known.
        fresh = {read.request_id for read in going if read.completed} - self._held
        over, failed = self._fence.judge(fresh, set(), self._clock.at(now))
        for read in going:
            if read.request_id in over - failed:
                self._used(read)
        self.reads = [read for read in going if read.request_id not in over]
        self._held = {read.request_id for read in self.reads if read.completed}

    def _goes_on(self, read: Read, now: float) -> bool:
        engine = self._engine()
        if now < read.next_at:
            return True
        if engine.engine_id != read.engine_id:
            # Nobody there, or another engine: the load fails.
            return False
        if not read.started and not self._start(read, engine, now):
            return False
        while read.copied_blocks < len(read.blocks) and now >= read.next_at:
            read.copied += engine.read(read.blocks[read.copied_blocks])
            read.copied_blocks += 1
            read.next_at += read.pace.block_s
        if read.copied_blocks == len(read.blocks) and now >= read.next_at:
            read.completed = True
            engine.free([read.set_id])
        return True

    def _start(self, read: Read, engine: DecodeEngine, now: float) -> bool:
        if read.pace.whole_hit:
            engine.free([read.set_id])
            return False
        # vLLM has measured the clock itself, at the handshake.
        if engine.clock.at(now) + _START_MARGIN_S >= read.deadline:
            return False
        read.started = True
        self._started(read)
        self._fence.started({read.request_id: _meta(read)})
        return True


def _meta(read: Read) -> Any:
    """Returns what vLLM's scheduler tells the worker (nixl/metadata.py, `ReqMeta`)."""
    remote = SimpleNamespace(engine_id=read.engine_id, host="127.0.0.1", port=5601, blocks_expiry_time=read.deadline)
    return SimpleNamespace(remote=remote, local_block_ids=(list(read.blocks),))
