"""The table that compares the two conversations."""

from collections.abc import Sequence

from rich.table import Table

from backhaul_local.conversation import Turn


def comparison(with_reuse: Sequence[Turn], without: Sequence[Turn]) -> Table:
    """Returns one row per turn. Token counts are those of the conversation with reuse."""
    table = Table(title="The same conversation with and without reuse of the decode engine's blocks")
    for heading in ("turn", "route"):
        table.add_column(heading)
    for heading in (
        "prompt tokens",
        "local hit",
        "read from D",
        "computed",
        "TTFT with reuse",
        "TTFT without",
        "ratio",
    ):
        table.add_column(heading, justify="right")
    for number, (on, off) in enumerate(zip(with_reuse, without, strict=True), start=1):
        table.add_row(
            str(number),
            f"{on.route} ({on.miss_reason})" if on.miss_reason else on.route,
            f"{on.prompt_tokens:,}",
            f"{on.local_tokens:,}",
            f"{on.read_tokens:,}",
            f"{on.computed_tokens:,}",
            f"{on.ttft_s * 1000:.0f} ms",
            f"{off.ttft_s * 1000:.0f} ms",
            f"{off.ttft_s / on.ttft_s:.1f}x",
        )
    return table


def verdict(with_reuse: Sequence[Turn], without: Sequence[Turn]) -> tuple[bool, str]:
    """Tells whether every turn has the same text in both conversations, and says so in one sentence."""
    different = [str(n) for n, (on, off) in enumerate(zip(with_reuse, without, strict=True), 1) if on.text != off.text]
    if different:
        return False, f"The texts DIFFER in turn {', '.join(different)}: this must never happen, please report it."
    return True, f"All {len(with_reuse)} replies are the same, word for word, with and without reuse."
