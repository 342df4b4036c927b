"""Scores that say how much worse than the best one each is."""

from collections.abc import Sequence


def least_is_best(amounts: Sequence[float]) -> list[float]:
    """Returns the least amount divided by each: 1 for the least, 0.5 for twice as much. Amounts are not negative."""
    least = min(amounts)
    return [least / amount if amount > least else 1.0 for amount in amounts]


def known_or_average(amounts: Sequence[float | None]) -> list[float]:
    """Fills in the average of what is known where an amount is not; 0 when none is."""
    known = [amount for amount in amounts if amount is not None]
    average = sum(known) / len(known) if known else 0.0
    return [average if amount is None else amount for amount in amounts]
