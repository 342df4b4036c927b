"""The most that any choice could have saved, had it known the future.

Each time between two turns of a conversation is an interval: the set's blocks held all through it save its tokens, held
for a part of it they save nothing. Which intervals to hold so that never more than the budget's blocks are held is a
packing of intervals; here each may be held in part as well, which can only give more (its linear relaxation). Releases
and reads take no time in it, and what is never asked for again costs it nothing.
"""

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from backhaul_replay.replay import Interval


class BoundError(RuntimeError):
    """The solver gave up."""


def most_tokens(intervals: list[Interval], block_count: int) -> float:
    """Returns an upper bound of the tokens that holding sets can save with ``block_count`` blocks. Raises BoundError.

    At each instant where an interval begins, the blocks held and those left idle are all blocks. The difference of one
    such equation and the one before names an interval only where it begins and where it ends, so that the program grows
    with the intervals and not with their overlaps.
    """
    intervals = [interval for interval in intervals if interval.block_count <= block_count and interval.token_count > 0]
    if not intervals:
        return 0.0
    begins = np.array([interval.begin_s for interval in intervals])
    ends = np.array([interval.end_s for interval in intervals])
    blocks = np.array([interval.block_count for interval in intervals], dtype=float)
    tokens = np.array([interval.token_count for interval in intervals], dtype=float)
    instants = np.unique(begins)
    count, most = len(intervals), len(instants)
    first = np.searchsorted(instants, begins)
    after = np.searchsorted(instants, ends)
    lasting = np.flatnonzero(after < most)
    rows = np.concatenate([first, after[lasting], np.arange(most), np.arange(1, most)])
    columns = np.concatenate([np.arange(count), lasting, count + np.arange(most), count + np.arange(most - 1)])
    values = np.concatenate([np.ones(count), -np.ones(len(lasting)), np.ones(most), -np.ones(most - 1)])
    held = csr_array((values, (rows, columns)), shape=(most, count + most))
    budget = np.zeros(most)
    budget[0] = block_count
    solved = linprog(
        np.concatenate([-tokens / blocks, np.zeros(most)]),
        A_eq=held,
        b_eq=budget,
        bounds=np.concatenate([np.stack([np.zeros(count), blocks], 1), np.tile([0.0, float(block_count)], (most, 1))]),
        method="highs",
    )
    if solved.status:
        raise BoundError(f"the bound was not found: {solved.message}")
    return float(-solved.fun)
