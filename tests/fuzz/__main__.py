"""Plays inputs to all targets: ``make fuzz``. Ends with a table, and with 1 when a parser has failed."""

import argparse
import logging
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from tests.fuzz.play import Score, play
from tests.fuzz.targets import TARGETS

_BATCH = 1_000
"""Inputs of one run. Hypothesis remembers what it has drawn, so that long runs grow slow."""
_SAY_EVERY_S = 10.0
_CRASHES = Path(".state/fuzz")

_BY_NAME = {target.name: target for target in TARGETS}


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs for one target."""

    name: str
    count: int
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Fuzzes until enough inputs were played or the time is over."""
    options = _options(arguments)
    names = [name for name in _BY_NAME if not options.only or any(part in name for part in options.only)]
    batches = list(_batches(names, options.inputs, options.seed))
    _say(f"{options.inputs:,} inputs for {len(names)} parsers, seed {options.seed}")
    scores = _played(batches, names, options)
    sys.stdout.write("\n".join(_table(scores)) + "\n")
    for name, score in scores.items():
        for number, crash in enumerate(score.crashes.values(), 1):
            _keep(name, number, repr(crash.given), crash.trace)
    sys.exit(1 if any(score.crashes for score in scores.values()) else 0)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("make fuzz", description="Gives every parser bytes that nobody sends in earnest.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="all parsers together; default: 1,000,000")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends after so long; default: no limit")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="the same one plays the same inputs")
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="parsers with this in their name")
    return parser.parse_args(arguments)


def _batches(names: Sequence[str], inputs: int, seed: int) -> Iterator[Batch]:
    """Yields batches of each parser in turn, so that a run that is cut short has seen them all."""
    each = -(-inputs // len(names))
    for start in range(0, each, _BATCH):
        for index, name in enumerate(names):
            yield Batch(name, min(_BATCH, each - start), (seed * 1_000_003 + start) * 1_000 + index)


def _played(batches: Sequence[Batch], names: Sequence[str], options: argparse.Namespace) -> dict[str, Score]:
    scores = {name: Score() for name in names}
    began = said = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes, _be_silent, maxtasksperchild=50) as pool:
        for name, score in pool.imap_unordered(_play, batches):
            scores[name].add(score)
            now = time.monotonic()
            if now - said >= _SAY_EVERY_S:
                said = now
                played, crashed = (
                    sum(getattr(one, field) for one in scores.values()) for field in ("inputs", "crashed")
                )
                _say(f"{played:,} inputs in {now - began:.0f} s, {crashed} crashes")
            if now - began > options.seconds:
                pool.terminate()
                break
    return scores


def _be_silent() -> None:
    # What parsers log of what they refuse would be a line for every other input.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable()


def _play(batch: Batch) -> tuple[str, Score]:
    return batch.name, play(_BY_NAME[batch.name], count=batch.count, seed_number=batch.seed)


def _table(scores: dict[str, Score]) -> Iterator[str]:
    yield "| parser | inputs | rejected | accepted | crashes | slowest input |"
    yield "|---|--:|--:|--:|--:|--:|"
    total = Score()
    for name, score in sorted(scores.items()):
        total.add(score)
        yield _row(name, score)
    yield _row("all", total)


def _row(name: str, score: Score) -> str:
    counts = f"{score.inputs:,} | {score.rejected:,} | {score.accepted:,} | {score.crashed:,}"
    return f"| {name} | {counts} | {score.slowest_s * 1000:,.0f} ms ({score.slowest}) |"


def _keep(name: str, number: int, given: str, trace: str) -> None:
    _CRASHES.mkdir(parents=True, exist_ok=True)
    path = _CRASHES / f"{name.replace(' ', '-')}-{number}.txt"
    path.write_text(f"{trace}\n{given}\n")
    _say(f"{name} failed: {path}\n{trace}")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
