"""Plays inputs to a target and counts what becomes of them."""

import hashlib
import time
import traceback
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.fuzz.target import Target

_MAX_CRASHES = 5
"""Crashes that are kept of one target, one of each kind."""


@dataclass(slots=True)
class Crash:
    """An input at which a parser failed."""

    given: Any
    trace: str

    @property
    def kind(self) -> str:
        """Where it failed, and how."""
        return "\n".join(self.trace.splitlines()[-4:])


@dataclass(slots=True)
class Score:
    """What became of inputs."""

    inputs: int = 0
    accepted: int = 0
    crashed: int = 0
    slowest_s: float = 0.0
    slowest: str = ""
    """Size and digest of that input."""
    seconds: float = 0.0
    crashes: dict[str, Crash] = field(default_factory=dict)

    @property
    def rejected(self) -> int:
        """Inputs that were refused as they should be."""
        return self.inputs - self.accepted - self.crashed

    def add(self, other: "Score") -> None:
        """Counts those of another run, too."""
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.crashed += other.crashed
        self.seconds += other.seconds
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest
        for kind, crash in other.crashes.items():
            if len(self.crashes) < _MAX_CRASHES:
                self.crashes.setdefault(kind, crash)


def play(target: Target, *, count: int, seed: int) -> Score:
    """Plays ``count`` inputs: the same ones for the same seed."""
    score, chance, began = Score(), Random(seed), time.perf_counter()
    for _ in range(count):
        _count(score, target, target.inputs(chance))
    score.seconds = time.perf_counter() - began
    return score


def _count(score: Score, target: Target, value: Any) -> None:
    score.inputs += 1
    began = time.perf_counter()
    try:
        score.accepted += target.accepts(value)
    except Exception as error:  # noqa: BLE001 - whatever a parser does not refuse is what is looked for
        score.crashed += 1
        crash = Crash(value, "".join(traceback.format_exception(error)))
        if len(score.crashes) < _MAX_CRASHES:
            score.crashes.setdefault(crash.kind, crash)
    took_s = time.perf_counter() - began
    if took_s > score.slowest_s:
        score.slowest_s, score.slowest = took_s, _name_of(value)


def _name_of(value: Any) -> str:
    shown = repr(value).encode()
    return f"{len(shown):,} B {hashlib.sha256(shown).hexdigest()[:8]}"
