"""Plays inputs to all targets: ``make fuzz``. Ends with a table, and with 1 when a parser has failed."""

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.fuzz.batches import Batch, batches, be_silent, names_with, played
from tests.fuzz.play import Score

_SAY_EVERY_S = 10.0
_CRASHES = Path(".state/fuzz")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fuzzes until enough inputs were played or the time is over."""
    options = _options(arguments)
    names = names_with(options.only)
    _say(f"{options.inputs:,} inputs for {len(names)} parsers, seed {options.seed}")
    scores = {name: Score() for name in names}
    work = batches(names, options.inputs, options.seed)
    _play(list(work), scores, processes=options.processes, seconds=options.seconds)
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


def _play(work: Sequence[Batch], scores: Mapping[str, Score], *, processes: int, seconds: float) -> None:
    began = said = time.monotonic()
    # Not forked: gRPC's threads do not survive that.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, be_silent) as pool:
        for future in as_completed([pool.submit(played, batch) for batch in work]):
            name, score = future.result()
            scores[name].add(score)
            now = time.monotonic()
            if now - said >= _SAY_EVERY_S:
                said = now
                _say(_progress(scores, now - began))
            if now - began > seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                return


def _progress(scores: Mapping[str, Score], took_s: float) -> str:
    inputs = sum(score.inputs for score in scores.values())
    return f"{inputs:,} inputs in {took_s:.0f} s, {sum(score.crashed for score in scores.values())} crashes"


def _table(scores: Mapping[str, Score]) -> Iterator[str]:
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
