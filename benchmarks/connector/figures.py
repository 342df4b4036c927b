"""What the measurements come to."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.connector.arms import STOCK

LONGEST_US = 1000.0
"""Longest that a call of one hook may take more than it does in vLLM's own connector."""
SHARE = 0.01
"""Most that a step of a real engine may take longer."""
_NUMBERS = ("step_us", "turn_us", "busiest_us", "waited_us", "engine_step_us", "steps")
_OF_ONE_ARM = ("role", "tokens", "arm")


def summed_up(measurements: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the medians of each arm's rounds, with what they are more than those of vLLM's own connector."""
    rounds: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for one in measurements:
        rounds.setdefault((one.get("role", "engine"), one["tokens"], one["arm"]), []).append(one)
    rows = {key: _medians(key, ones) for key, ones in rounds.items()}
    return [{**row, **_added(row, rows[row["role"], row["tokens"], STOCK])} for row in rows.values()]


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what must not be."""
    found = []
    for row in rows:
        name = f"{row['role']}, {row['tokens']} tokens, agent {row['arm']}"
        if row["added_longest_us"] > LONGEST_US:
            found.append(f"{name}: a call of {row['hook']} takes {row['added_longest_us']:.0f} us longer")
        if row.get("share", 0.0) > SHARE:
            found.append(f"{name}: a step takes {row['share']:.1%} longer")
    return found


def _medians(key: tuple[str, int, str], ones: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers = {name: median(one[name] for one in ones) for name in _NUMBERS if name in ones[0]}
    hooks_us = {hook: median(one["hooks_us"][hook] for one in ones) for hook in ones[0]["hooks_us"]}
    longest = {"longest_us": max(hooks_us.values()), "hooks_us": hooks_us}
    return {**dict(zip(_OF_ONE_ARM, key, strict=True)), "rounds": len(ones), **numbers, **longest}


def _added(row: Mapping[str, Any], stock: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an arm takes longer, and the hook whose longest call grew most."""
    hooks_us = {hook: took - stock["hooks_us"][hook] for hook, took in row["hooks_us"].items()}
    hook = max(hooks_us, key=lambda name: hooks_us[name])
    added: dict[str, Any] = {f"added_{name}": row[name] - stock[name] for name in ("step_us", "turn_us", "busiest_us")}
    added |= {"hook": hook, "added_longest_us": hooks_us[hook]}
    if "engine_step_us" in row:
        added["share"] = added["added_step_us"] / stock["engine_step_us"]
    return added
