"""Work of a fuzzing run in pieces, for processes beside one another."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import structlog

from tests.fuzz.play import Score, play
from tests.fuzz.targets import TARGETS

_SIZE = 1_000
"""Inputs of one piece."""

_BY_NAME = {target.name: target for target in TARGETS}


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs for one target."""

    name: str
    count: int
    seed: int


def names_with(parts: Sequence[str]) -> list[str]:
    """Returns the names of targets that contain one of the parts; all of them for none."""
    return [name for name in _BY_NAME if not parts or any(part in name for part in parts)]


def batches(names: Sequence[str], inputs: int, seed: int) -> Iterator[Batch]:
    """Yields batches of each target in turn, so that a run that is cut short has seen them all."""
    each = -(-inputs // len(names))
    for start in range(0, each, _SIZE):
        for index, name in enumerate(names):
            yield Batch(name, min(_SIZE, each - start), (seed * 1_000_003 + start) * 1_000 + index)


def be_silent() -> None:
    """Logs nothing: what parsers log of what they refuse would be a line for every other input."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable()


def played(batch: Batch) -> tuple[str, Score]:
    """Plays a batch."""
    return batch.name, play(_BY_NAME[batch.name], count=batch.count, seed=batch.seed)
