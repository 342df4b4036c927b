"""Plays random histories of claims until one goes wrong or the time is over: ``python -m tests.model --minutes 10``."""

import argparse
import random
import sys
import time

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import ClaimsMachine

_BATCH = 100
_STEPS = 50


def play(number: int, *, examples: int, steps: int, shrink: bool = True) -> None:
    """Plays the histories of one seed. Raises what the first bad one raises, after it was made short."""
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=phases,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(seed(number)(ClaimsMachine), settings=chosen)


def main() -> int:
    """Returns 1 when a history went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to play (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="first seed; it is printed, and gives the same histories again")
    arguments = parser.parse_args()
    number = random.randrange(10**9) if arguments.seed is None else arguments.seed
    end = time.monotonic() + 60 * arguments.minutes
    played = 0
    while played == 0 or time.monotonic() < end:
        sys.stdout.write(f"seed {number}: {_BATCH} histories of at most {_STEPS} steps\n")
        sys.stdout.flush()
        try:
            play(number, examples=_BATCH, steps=_STEPS)
        except AssertionError:
            sys.stdout.write(f"went wrong: python -m tests.model --seed {number}\n")
            raise
        played += _BATCH
        number += 1
    sys.stdout.write(f"{played} histories, nothing went wrong\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
