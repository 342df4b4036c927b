"""What a comparison found, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from backhaul_replay.replay import Outcome
from backhaul_replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Row:
    """One way to retain, and the most that was possible for it; None where no budget held."""

    policy: str
    outcome: Outcome
    most_tokens: float | None


_COLUMNS = (
    "policy",
    "turns",
    "hits",
    "saved, pinned",
    "saved, cached",
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
    return {"seconds": trace.end_s, "policies": [_object(row) for row in rows]}


def _line(trace: Trace, row: Row) -> tuple[str, ...]:
    outcome, tally = row.outcome, row.outcome.tally
    saved = outcome.pinned_tokens + outcome.cached_tokens
    return (
        row.policy,
        f"{outcome.turns:,}",
        _percent(outcome.pinned_hits + outcome.cached_hits, outcome.returns),
        f"{outcome.pinned_tokens:,}",
        f"{outcome.cached_tokens:,}",
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
