"""Counts of a run, and its report."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.soak.client import Answer
from tests.soak.histories import Planned

_MAX_WRONG = 20


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    read_tokens: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Texts that differ from the model's, at most 20 of them whole."""
    wrong_count: int = 0

    @property
    def turn_count(self) -> int:
        """Turns that ended, however."""
        return self.outcomes.total()

    @property
    def answered_count(self) -> int:
        """Turns with a complete answer."""
        return self.outcomes["answered"]

    @property
    def failures(self) -> dict[str, int]:
        """Turns without a complete answer that the client did not leave, by what it was told."""
        return {name: count for name, count in self.outcomes.items() if name not in ("answered", "left")}

    def add(self, turn: Planned, answer: Answer) -> None:
        """Counts one turn."""
        self.outcomes[answer.outcome] += 1
        self.kinds[turn.kind] += 1
        if answer.outcome == "answered":
            self.routes[answer.route or "none"] += 1
            self.misses[answer.miss or "-"] += 1
            self.read_tokens += answer.read_tokens

    def add_wrong(self, turn: Planned, answer: Answer, expected: str) -> None:
        """Notes a wrong text."""
        self.wrong_count += 1
        if len(self.wrong) < _MAX_WRONG:
            self.wrong.append(
                {
                    "router": answer.url,
                    "kind": turn.kind,
                    "route": answer.route,
                    "messages": turn.messages,
                    "got": answer.text,
                    "expected": expected,
                }
            )

    def merge(self, other: "Tally") -> None:
        """Adds what another process counted."""
        for name in ("outcomes", "kinds", "routes", "misses"):
            getattr(self, name).update(getattr(other, name))
        self.read_tokens += other.read_tokens
        self.wrong_count += other.wrong_count
        self.wrong = [*self.wrong, *other.wrong][:_MAX_WRONG]

    def document(self) -> dict[str, Any]:
        """Returns the counts as JSON."""
        return {
            "turns": self.turn_count,
            "outcomes": dict(self.outcomes.most_common()),
            "kinds": dict(self.kinds.most_common()),
            "routes": dict(self.routes.most_common()),
            "misses": dict(self.misses.most_common()),
            "read_tokens": self.read_tokens,
            "wrong_texts": self.wrong_count,
            "wrong": self.wrong,
        }
