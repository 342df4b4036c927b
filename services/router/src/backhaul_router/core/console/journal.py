"""The turns that this router ran last, for people who look on: figures and reasons, nothing of what was said.

A session id never gets here. What a conversation's turns have in common is their lookup keys, which are digests; they
tell who comes with the id, or with a turn, which of the others belong to it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from backhaul_router.core import misses
from backhaul_router.core.engines import EngineError
from backhaul_router.core.errors import ApiError
from backhaul_router.core.lookup import TurnKeys
from backhaul_router.core.turn import Outcome, Route

MAX_REASONS = 60
"""Reasons that are told apart: some of them come from peers. The others count as `other`."""

NOTHING_TO_REUSE = misses.WITHOUT_REUSE | {misses.FIRST_TURN, misses.NOT_NEEDED}
"""Cold turns that had nothing to gain."""


@dataclass(slots=True, eq=False)
class Entry:
    """One turn. Instants are by the router's monotonic clock."""

    number: int
    """From 1, by when turns began."""
    began_at: float
    api: str
    """Path that it came by."""
    model: str
    tenant: str
    outcome: Outcome
    scope: str = ""
    find: tuple[str, ...] = ()
    """Keys under which the turn before it was looked for."""
    labels: tuple[str, ...] = ()
    """Keys under which the next turn finds it, that of the session first if it names one."""
    own: tuple[str, ...] = ()
    """Those of the keys that no turn but its continuations looks under."""
    holder: str = ""
    """Node whose blocks it was to read; empty when there was none."""
    prefill: str = ""
    """Node that computed the prompt; empty without one."""
    decode: str = ""
    """Node that answered; empty when none could."""
    tried: tuple[str, ...] = ()
    """Nodes that failed it."""
    trace_id: str = ""
    result: str = ""
    """How it ended: as `Outcome` says, or by which error; empty while it runs."""
    ended_at: float = 0.0
    """0 while it runs."""
    place: int = 0
    """From 1, by when turns ended; 0 while it runs."""

    def keyed(self, scope: str, keys: TurnKeys) -> None:
        """Takes where the turn looked, and where it will be found."""
        self.scope, self.find, self.labels, self.own = scope, keys.find, keys.label, keys.label[-1:]

    @property
    def session(self) -> str:
        """The key of its session; empty when it names none."""
        return self.labels[0] if len(self.labels) > 1 else ""


@dataclass(slots=True)
class Tally:
    """What all turns came to since the router's start."""

    routes: Counter[str] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    continued: int = 0
    """Turns that had something to gain from reuse."""
    reused: int = 0
    """Those of them that reused blocks."""
    prompt_tokens: int = 0
    local_tokens: int = 0
    """Of the prompts: what prefill engines had in their own caches."""
    read_tokens: int = 0
    """Of the prompts: what was read from decode engines."""
    ttft_counts: Counter[str] = field(default_factory=Counter)
    """Streamed turns, by route."""
    ttft_s: dict[str, float] = field(default_factory=dict)
    """Their times to the first byte together, by route."""

    def count(self, entry: Entry) -> None:
        """Takes a turn that is over."""
        outcome, route = entry.outcome, entry.outcome.route.value
        self.routes[route] += 1
        self.results[entry.result] += 1
        if outcome.miss:
            known = outcome.miss in self.misses or len(self.misses) < MAX_REASONS
            self.misses[outcome.miss if known else "other"] += 1
        if entry.result == "ok" and outcome.miss not in NOTHING_TO_REUSE:
            self.continued += 1
            self.reused += outcome.route is not Route.COLD
        self.prompt_tokens += outcome.prompt_token_count
        self.local_tokens += outcome.local_token_count
        self.read_tokens += outcome.read_token_count
        if outcome.ttft_s is not None:
            self.ttft_counts[route] += 1
            self.ttft_s[route] = self.ttft_s.get(route, 0.0) + outcome.ttft_s


class Journal:
    """The last turns, those that run, and sums of all. Without room for any it takes no notes at all."""

    def __init__(self, keep: int, monotonic: Callable[[], float]) -> None:
        """``keep``: how many turns that are over are remembered."""
        self._monotonic = monotonic
        self._over: deque[Entry] = deque(maxlen=keep)
        self._running: dict[int, Entry] = {}
        self._begun = self._ended = 0
        self.tally = Tally()

    @contextmanager
    def turn(self, api: str, model: str, tenant: str, outcome: Outcome) -> Iterator[Entry]:
        """Notes one turn."""
        entry = Entry(self._begun + 1, self._monotonic(), api, model, tenant, outcome)
        if not self.keeps:
            yield entry
            return
        self._begun = entry.number
        self._running[entry.number] = entry
        entry.result = "cancelled"
        try:
            yield entry
            entry.result = outcome.result
        except Exception as error:
            entry.result = _result_of(error)
            raise
        finally:
            del self._running[entry.number]
            self._ended += 1
            entry.ended_at, entry.place = self._monotonic(), self._ended
            self._over.append(entry)
            self.tally.count(entry)

    @property
    def keeps(self) -> bool:
        """Whether there is room for any."""
        return bool(self._over.maxlen)

    @property
    def running_count(self) -> int:
        """Turns that run."""
        return len(self._running)

    @property
    def ended_count(self) -> int:
        """Turns that are over."""
        return self._ended

    def since(self, place: int, *, most: int) -> list[Entry]:
        """Returns the newest turns, ``most`` at the most, that ended after the one of that place; oldest first."""
        count = min(most, self._ended - place, len(self._over))
        return [self._over[index] for index in range(-count, 0)]

    def find(self, number: int) -> Entry | None:
        """Returns a turn by its number, running or over; None when it is forgotten."""
        return self._running.get(number) or next((entry for entry in self._over if entry.number == number), None)

    def under(self, key: str) -> list[Entry]:
        """Returns the remembered turns that can be found under a key, oldest first."""
        return [entry for entry in self._all() if key in entry.labels]

    def conversation(self, turn: Entry) -> list[Entry]:
        """Returns the remembered turns of a turn's conversation, oldest first: its session's, or those before it and
        after it of which one went on from the other.

        Turns with the same messages cannot be told apart: what both may have gone on from counts as before both.
        """
        entries = [entry for entry in self._all() if entry.scope == turn.scope]
        if turn.session:
            return [entry for entry in entries if entry.session == turn.session]
        found, before, after = {turn}, set(turn.find), set(turn.own)
        for entry in reversed(entries):
            if entry.number < turn.number and before.intersection(entry.own):
                found.add(entry)
                before.update(entry.find)
        for entry in entries:
            if entry.number > turn.number and after.intersection(entry.find):
                found.add(entry)
                after.update(entry.own)
        return [entry for entry in entries if entry in found]

    def _all(self) -> list[Entry]:
        return sorted((*self._over, *self._running.values()), key=lambda entry: entry.number)


def _result_of(error: Exception) -> str:
    """Returns what the log of turns says."""
    if isinstance(error, ApiError):
        return f"error_{error.status}"
    if isinstance(error, EngineError):
        # Before anything of the answer was there it would be the client's error.
        return "broken"
    return "client_gone" if isinstance(error, ConnectionError) else "failed"
