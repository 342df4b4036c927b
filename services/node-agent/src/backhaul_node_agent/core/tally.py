"""What became of block sets: counted for people, never decided by."""

from collections import Counter
from enum import Enum

from backhaul_node_agent.core import life as lf
from backhaul_node_agent.core.life import Life, State, Why


class End(Enum):
    """How a set ended."""

    READ = "read"
    """A prefill engine read it, or said that it had no use for it."""
    RELEASED = "released"
    """The engine freed it, as it was told to."""
    FREED = "freed"
    """The engine freed it by itself: its deadline passed, or it was short of memory."""
    ENGINE_GONE = "engine_gone"


_BY_EVENT: dict[type[lf.Event], Why] = {
    lf.FenceLifted: Why.FENCED,
    lf.ClaimReturned: Why.ASKED,
    lf.ClockJumped: Why.CLOCK_JUMPED,
}


class Tally:
    """Counts since the agent began."""

    def __init__(self) -> None:
        self.releases: Counter[Why] = Counter()
        """Sets whose release began."""
        self.ends: Counter[End] = Counter()
        """Sets that are gone."""

    def note(self, before: Life, event: lf.Event, after: Life | None) -> None:
        """Takes one step of a set's life."""
        if after is None:
            self.ends[_end(before)] += 1
        elif after.state is State.RELEASING and before.state is not State.RELEASING:
            self.releases[_why(before, event)] += 1


def _end(before: Life) -> End:
    match before.state:
        case State.CLAIMED:
            return End.READ
        case State.RELEASING:
            return End.RELEASED
        case _:
            return End.FREED


def _why(before: Life, event: lf.Event) -> Why:
    match event:
        case lf.ReleaseAsked():
            return event.why
        case lf.Tick():
            return Why.LAPSED if before.state is State.CLAIMED else Why.EXPIRED
        case _:
            return _BY_EVENT[type(event)]
