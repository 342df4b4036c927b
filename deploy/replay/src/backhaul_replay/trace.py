"""Traces: which turns came when, and how long they were. JSON lines, one turn each."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

MAX_TOKENS = 10_000_000
MAX_SECONDS = 30 * 86_400.0


class TraceError(ValueError):
    """A trace that cannot be replayed; says which line and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation."""

    conversation: str
    prompt_tokens: int
    """All that the prompt has, history included."""
    output_tokens: int
    arrival_s: float | None = None
    """When it comes, from the start of the trace; never before the turn before it has ended."""
    gap_s: float | None = None
    """In its place: how long after the end of the turn before it."""
    scope: str = ""
    """Tenant and model; gaps are learnt for each."""


@dataclass(slots=True)
class Conversation:
    """Turns in their order."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def arrival_s(self) -> float:
        """When the first turn comes."""
        arrival_s = self.turns[0].arrival_s
        assert arrival_s is not None
        return arrival_s


@dataclass(frozen=True, slots=True)
class Trace:
    """Conversations, and how long to watch them."""

    conversations: list[Conversation]
    end_s: float
    """The last arrival that the trace names."""

    @property
    def turn_count(self) -> int:
        """Turns of all conversations, those after the end included."""
        return sum(len(conversation.turns) for conversation in self.conversations)


def parse(lines: Iterable[str]) -> Trace:
    """Reads a trace. Raises TraceError for the first line that is not a turn, and for a trace without turns."""
    conversations: dict[str, Conversation] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turn = _turn(line)
            conversation = conversations.setdefault(turn.conversation, Conversation())
            _check_order(conversation, turn)
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from None
        conversation.turns.append(turn)
    if not conversations:
        raise TraceError("the trace has no turns")
    return of(conversations.values())


def of(conversations: Iterable[Conversation]) -> Trace:
    """Makes a trace of conversations."""
    every = list(conversations)
    arrivals = (turn.arrival_s for conversation in every for turn in conversation.turns)
    return Trace(every, max(arrival_s for arrival_s in arrivals if arrival_s is not None))


def render(trace: Trace) -> Iterator[str]:
    """Yields the lines of a trace."""
    for conversation in trace.conversations:
        for turn in conversation.turns:
            yield json.dumps(
                {name: value for name in Turn.__slots__ if (value := getattr(turn, name)) not in (None, "")}
            )


def _turn(line: str) -> Turn:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise TraceError(f"an object is expected, not {line.strip()[:60]}")
    if unknown := sorted(fields.keys() - set(Turn.__slots__)):
        raise TraceError(f"unknown field {unknown[0]!r}; known are {', '.join(Turn.__slots__)}")
    return Turn(
        conversation=_text(fields, "conversation", required=True),
        prompt_tokens=_count(fields, "prompt_tokens"),
        output_tokens=_count(fields, "output_tokens"),
        arrival_s=_seconds(fields, "arrival_s"),
        gap_s=_seconds(fields, "gap_s"),
        scope=_text(fields, "scope"),
    )


def _check_order(conversation: Conversation, turn: Turn) -> None:
    if turn.arrival_s is not None and turn.gap_s is not None:
        raise TraceError("a turn has arrival_s or gap_s, not both")
    if not conversation.turns:
        if turn.arrival_s is None:
            raise TraceError("the first turn of a conversation needs arrival_s")
        return
    if turn.arrival_s is None and turn.gap_s is None:
        raise TraceError("a turn needs arrival_s or gap_s")
    known = [before.arrival_s for before in conversation.turns if before.arrival_s is not None]
    if turn.arrival_s is not None and turn.arrival_s < known[-1]:
        raise TraceError(f"arrival_s {turn.arrival_s} is before that of the turn before it, {known[-1]}")
    if turn.scope != conversation.turns[0].scope:
        raise TraceError("all turns of a conversation have one scope")


def _text(fields: Mapping[str, object], name: str, *, required: bool = False) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or (required and not value):
        raise TraceError(f"{name} must be a text{' that is not empty' if required else ''}, got {value!r}")
    return value


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise TraceError(f"{name} must be a whole number from 1 to {MAX_TOKENS}, got {value!r}")
    return value


def _seconds(fields: Mapping[str, object], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    # NaN is between no two numbers.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
        raise TraceError(f"{name} must be a number of seconds from 0 to {MAX_SECONDS:.0f}, got {value!r}")
    return float(value)
