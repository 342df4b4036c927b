"""What a comparison found, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from backhaul_replay.agent import Budget
from backhaul_replay.hardware import Hardware
from backhaul_replay.replay import Outcome
from backhaul_replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Row:
    """One way to retain, and the most that was possible for it; None where no budget held."""

    policy: str
    outcome: Outcome
    most_tokens: float | None


_AS_GOOD = 1.005
"""Closer than this is a draw."""

_COLUMNS = (
    "policy",
    "turns",
    "hits",
    "saved, pinned",
    "saved, cached",
    "saved, all",
    "of prompts",
    "of bound",
    "pinned, mean",
    "pinned, peak",
    "delayed",
    "delayed s",
)


def as_table(trace: Trace, rows: Sequence[Row]) -> str:
    """Returns the figures for people."""
    lines = [_COLUMNS, *(_line(trace, row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def as_json(trace: Trace, rows: Sequence[Row]) -> dict[str, object]:
    """Returns the figures for programs."""
    return {
        "seconds": trace.end_s,
        "conversations": len(trace.conversations),
        "turns": trace.turn_count,
        "policies": [_object(row) for row in rows],
    }


def heading(name: str, trace: Trace, hardware: Hardware, budget: Budget, max_retention_s: float) -> str:
    """Returns what is played, on what."""
    return (
        f"Trace:  {name}; {len(trace.conversations):,} conversations of {trace.turn_count:,} turns, "
        f"{trace.end_s:,.0f} s until the last arrival\n"
        f"Engine: {hardware.block_count:,} blocks of {hardware.block_size:,} tokens; per second "
        f"{hardware.prefill_tokens_per_s:,.0f} tokens computed, {hardware.transfer_tokens_per_s:,.0f} read; "
        f"{hardware.decode_step_s:g} s from token to token\n"
        f"Agent:  pins {budget.share:.0%} of the blocks at most, less above {budget.mark:.0%} use; "
        f"a set for {max_retention_s:,.0f} s at most\n"
    )


def remarks(trace: Trace, rows: Sequence[Row]) -> list[str]:
    """Returns what a reader should know of these figures."""
    said = []
    if left_out := min(trace.turn_count - row.outcome.turns for row in rows):
        said.append(
            f"{left_out:,} of {trace.turn_count:,} turns are left out under every policy: they had not ended by the\n"
            f"last arrival that the trace names ({trace.end_s:,.0f} s), with which the replay ends."
        )
    saved = {row.policy: row.outcome.pinned_tokens for row in rows}
    if saved["benefit"] <= saved["lru"] * _AS_GOOD:
        said.append(
            "benefit saves no more than lru here. It can only where memory is short and conversations return\n"
            "differently (scopes; tools and people): where all are alike the youngest is worth most, which lru keeps."
        )
    return said


def _line(trace: Trace, row: Row) -> tuple[str, ...]:
    outcome, tally = row.outcome, row.outcome.tally
    saved = outcome.pinned_tokens + outcome.cached_tokens
    return (
        row.policy,
        f"{outcome.turns:,}",
        _percent(outcome.pinned_hits + outcome.cached_hits, outcome.returns),
        f"{outcome.pinned_tokens:,}",
        f"{outcome.cached_tokens:,}",
        f"{saved:,}",
        _percent(saved, outcome.prompt_tokens),
        "" if row.most_tokens is None else _percent(outcome.pinned_tokens, row.most_tokens),
        f"{tally.pinned_block_s / trace.end_s:,.0f}" if trace.end_s else "0",
        f"{tally.peak_pinned:,}",
        f"{tally.delayed:,}",
        f"{tally.delayed_s:,.1f}",
    )


def _object(row: Row) -> dict[str, object]:
    outcome, tally = row.outcome, row.outcome.tally
    return {
        "policy": row.policy,
        "turns": outcome.turns,
        "returns": outcome.returns,
        "pinned_hits": outcome.pinned_hits,
        "cached_hits": outcome.cached_hits,
        "prompt_tokens": outcome.prompt_tokens,
        "pinned_tokens_saved": outcome.pinned_tokens,
        "cached_tokens_saved": outcome.cached_tokens,
        "most_tokens": row.most_tokens,
        "pinned_block_seconds": round(tally.pinned_block_s, 3),
        "peak_pinned_blocks": tally.peak_pinned,
        "delayed_turns": tally.delayed,
        "delayed_seconds": round(tally.delayed_s, 3),
        "waited_seconds": round(tally.waited_s, 3),
        "preemptions": tally.preemptions,
    }


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
