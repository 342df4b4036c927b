"""Plays a trace against one decode engine and one way to retain, and counts what it saves."""

from dataclasses import dataclass, field
from functools import partial

from backhaul_node_agent.core.retention.gaps import Crowd, Gaps, Pace, pace_after
from backhaul_replay.agent import Agent, Budget
from backhaul_replay.clock import Clock
from backhaul_replay.engine import History, Request, Tally
from backhaul_replay.hardware import Hardware
from backhaul_replay.policies import Contender
from backhaul_replay.trace import Conversation, Trace

WATCHED_S = 1_800.0
"""How long the agent watches for a conversation's next turn, pinned or not."""
LEAST_CACHED = 256
"""Fewer cached tokens are not worth a second chance; nor is less than half of what the turn left."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two turns of a conversation: keeping the set all through it saves the tokens."""

    begin_s: float
    end_s: float
    block_count: int
    token_count: int


@dataclass(slots=True)
class Outcome:
    """What one way to retain made of a trace."""

    turns: int = 0
    """Turns that ended within the trace's time."""
    returns: int = 0
    """Turns that came and had one before them."""
    pinned_hits: int = 0
    cached_hits: int = 0
    pinned_tokens: int = 0
    """Prefill tokens that pinned sets saved."""
    cached_tokens: int = 0
    """Prefill tokens that second chances saved."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all turns that came."""
    intervals: list[Interval] = field(default_factory=list)
    """Where tokens could have been saved."""
    tally: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class _Course:
    """How far a conversation has come."""

    conversation: Conversation
    history: History
    next: int = 0
    """The turn that comes next."""
    pace: Pace = Pace.FIRST
    last_tokens: int = 0
    last_blocks: int = 0
    ended_s: float = 0.0

    @property
    def set_id(self) -> str:
        """Of the set that the last turn left."""
        return f"{self.conversation.turns[0].conversation}/{self.next}"

    @property
    def scope(self) -> str:
        """Of all its turns."""
        return self.conversation.turns[0].scope


def replay(
    trace: Trace, contender: Contender, hardware: Hardware, budget: Budget, *, gaps: Gaps | None = None
) -> Outcome:
    """Returns what a way to retain makes of a trace until the last arrival that it names.

    ``gaps`` is what was learnt before; None: nothing but the stated prior. Raises ValueError when a turn is longer than
    all of the engine's memory.
    """
    longest = max(turn.prompt_tokens + turn.output_tokens for each in trace.conversations for turn in each.turns)
    most = hardware.block_count * hardware.block_size
    if longest > most:
        raise ValueError(f"a turn of {longest} tokens never fits into the engine's {most}: give it more blocks")
    return _Replay(trace, contender, hardware, budget, Gaps() if gaps is None else gaps).run()


class _Replay:
    def __init__(self, trace: Trace, contender: Contender, hardware: Hardware, budget: Budget, gaps: Gaps) -> None:
        self._trace = trace
        self._hardware = hardware
        self._clock = Clock()
        self._gaps = gaps
        self._contender = contender
        self._agent = Agent(contender, gaps, budget, hardware, self._clock)
        self._outcome = Outcome(tally=self._agent.engine.tally)

    def run(self) -> Outcome:
        for conversation in self._trace.conversations:
            course = _Course(conversation, History(conversation.turns[0].conversation))
            self._clock.at(conversation.arrival_s, partial(self._arrive, course))
        self._clock.run(self._trace.end_s)
        self._agent.engine.count()
        return self._outcome

    def _arrive(self, course: _Course) -> None:
        """A turn comes: what is kept of the one before is claimed, the rest of its prompt is computed."""
        turn = course.conversation.turns[course.next]
        self._outcome.prompt_tokens += turn.prompt_tokens
        reused, wait_s = 0, 0.0
        if course.next:
            reused, wait_s = self._return(course, turn.prompt_tokens)
        request = Request(
            course.history, turn.prompt_tokens, turn.output_tokens, lambda request: self._ended(course, request)
        )
        compute_s = (turn.prompt_tokens - reused) / self._hardware.prefill_tokens_per_s
        self._clock.after(wait_s + compute_s, lambda: self._agent.engine.submit(request))

    def _return(self, course: _Course, prompt_tokens: int) -> tuple[int, float]:
        """Returns the tokens that need no prefill, and the time to read them."""
        gap_s = self._clock.now - course.ended_s
        self._gaps.returned(Crowd(course.scope, course.pace), gap_s, self._clock.now)
        course.pace = pace_after(gap_s)
        reusable = self._reusable(course, prompt_tokens)
        outcome = self._outcome
        outcome.returns += 1
        if not reusable:
            return 0, 0.0
        outcome.intervals.append(Interval(course.ended_s, self._clock.now, course.last_blocks, reusable))
        claimed = self._agent.claim(course.set_id)
        if claimed is not None:
            read_s = reusable / self._hardware.transfer_tokens_per_s
            self._clock.after(read_s, lambda: self._agent.free(claimed))
            outcome.pinned_hits += 1
            outcome.pinned_tokens += reusable
            return reusable, read_s
        if not self._contender.second_chance:
            return 0, 0.0
        return self._second_chance(course, prompt_tokens, reusable)

    def _reusable(self, course: _Course, prompt_tokens: int) -> int:
        """Returns the tokens of the last turn that a prompt begins with: all, or none when it is shorter."""
        if prompt_tokens > course.last_tokens:
            return course.last_tokens
        course.history = course.history.rewritten()
        return 0

    def _second_chance(self, course: _Course, prompt_tokens: int, reusable: int) -> tuple[int, float]:
        engine = self._agent.engine
        blocks = engine.cached(Request(course.history, prompt_tokens, 0, lambda _: None, num_tokens=prompt_tokens))
        found = min(len(blocks) * self._hardware.block_size, reusable)
        if found < LEAST_CACHED or found < reusable / 2:
            return 0, 0.0
        engine.hold(blocks)
        read_s = self._hardware.harvest_s + found / self._hardware.transfer_tokens_per_s
        self._clock.after(read_s, lambda: engine.drop(blocks))
        self._outcome.cached_hits += 1
        self._outcome.cached_tokens += found
        return found, read_s

    def _ended(self, course: _Course, request: Request) -> None:
        """A turn ends: its blocks are retained, and the next turn comes when the trace says."""
        now = self._clock.now
        self._outcome.turns += 1
        course.last_tokens, course.last_blocks, course.ended_s = request.num_tokens, len(request.block_ids), now
        course.next += 1
        crowd = Crowd(course.scope, course.pace)
        self._watch(course, crowd)
        self._agent.retain(course.set_id, request, crowd)
        if course.next == len(course.conversation.turns):
            return
        turn = course.conversation.turns[course.next]
        due_s = now + turn.gap_s if turn.gap_s is not None else turn.arrival_s or 0.0
        self._clock.at(due_s, lambda: self._arrive(course))

    def _watch(self, course: _Course, crowd: Crowd) -> None:
        ended_s = course.ended_s

        def silent() -> None:
            if course.ended_s == ended_s and self._clock.now >= ended_s + WATCHED_S:
                self._gaps.silent(crowd, WATCHED_S, self._clock.now)

        self._clock.after(WATCHED_S, silent)
