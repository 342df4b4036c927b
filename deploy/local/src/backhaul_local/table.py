"""The table that compares the two conversations."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from backhaul_local.conversation import Turn

_FIGURES = ("prompt\ntokens", "local\nhit", "read\nfrom D", "com-\nputed", "TTFT\non", "TTFT\noff", "ratio")
_CAPTION = "Tokens are those with reuse. TTFT: time to first token, with reuse on and off."


def comparison(with_reuse: Sequence[Turn], without: Sequence[Turn]) -> Table:
    """Returns one row per turn. Token counts are those of the conversation with reuse."""
    table = Table(title="The same conversation with and without reuse", caption=_CAPTION, box=box.SIMPLE_HEAD)
    for heading in ("turn", "route"):
        table.add_column(heading)
    for heading in _FIGURES:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (on, off) in enumerate(zip(with_reuse, without, strict=True), start=1):
        table.add_row(
            str(number),
            _route(on),
            f"{on.prompt_tokens:,}",
            f"{on.local_tokens:,}",
            f"{on.read_tokens:,}",
            f"{on.computed_tokens:,}",
            f"{on.ttft_s * 1000:.0f} ms",
            f"{off.ttft_s * 1000:.0f} ms",
            _ratio(on, off),
        )
    return table


def _ratio(on: Turn, off: Turn) -> str:
    """Two cold turns differ by chance only."""
    return "\N{EN DASH}" if on.route == off.route == "cold" else f"{off.ttft_s / on.ttft_s:.1f}x"


def _route(turn: Turn) -> str:
    return turn.route if turn.miss_reason in ("", "first_turn") else f"{turn.route}: {turn.miss_reason}"


def verdict(with_reuse: Sequence[Turn], without: Sequence[Turn]) -> tuple[bool, str]:
    """Tells whether every turn has the same text in both conversations, and says so in one sentence."""
    different = [str(n) for n, (on, off) in enumerate(zip(with_reuse, without, strict=True), 1) if on.text != off.text]
    if different:
        return False, f"The texts DIFFER in turn {', '.join(different)}: this must never happen, please report it."
    return True, f"All {len(with_reuse)} replies are the same, word for word, with and without reuse."
