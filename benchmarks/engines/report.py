"""What a run has shown, for people and for machines."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines.cases import ARMS, ONE_WAY, SHIPPED, Case
from benchmarks.engines.figures import speedup
from benchmarks.engines.run import Plan, Results, Seen
from benchmarks.routing.machine import description

_BUSY = 0.2
"""Share of the cores that others may use before a run measures them."""


def document(plan: Plan, results: Results, *, engines: str, simulated: bool, seconds: float) -> dict[str, Any]:
    """Returns the report as JSON, of the cases that all arms have played. ``engines`` says what they are."""
    played = [case for case in plan.cases if all(results[case.name, arm.name].conversations for arm in ARMS)]
    return {
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": description(),
        "engines": engines,
        "simulated": simulated,
        "rounds": plan.rounds,
        "seconds": round(seconds, 1),
        "failures": [
            f"{case.name}, {arm.name}: a conversation failed: {why}"
            for case in plan.cases
            for arm in ARMS
            for why in results[case.name, arm.name].failures
        ],
        "cases": {case.name: _case(case, results) for case in played},
    }


def _case(case: Case, results: Results) -> dict[str, Any]:
    seen = {arm.name: results[case.name, arm.name] for arm in ARMS}
    one_way = _times(case, seen[ONE_WAY])
    return {
        **asdict(case),
        "prompt_tokens": max(turn.prompt_tokens for turns in seen[ONE_WAY].conversations for turn in turns),
        "different_texts": _different(seen.values()),
        "arms": {name: _arm(case, of_arm) for name, of_arm in seen.items()},
        "ratios": {
            name: asdict(speedup(_times(case, of_arm), one_way, seed=case.name))
            for name, of_arm in seen.items()
            if name != ONE_WAY
        },
    }


def _arm(case: Case, seen: Seen) -> dict[str, Any]:
    counted = [turn for turns in seen.conversations for turn in turns[case.first_turn :]]
    own, all_of_it = (fmean(shares) for shares in zip(*seen.busy, strict=True))
    return {
        "median_ttft_s": median(turn.ttft_s for turn in counted),
        "by_turn_s": [[turn.ttft_s for turn in turns] for turns in zip(*seen.conversations, strict=True)],
        "routes": dict(Counter(turn.route for turn in counted).most_common()),
        "misses": dict(Counter(turn.miss_reason for turn in counted if turn.miss_reason).most_common()),
        "read_tokens": round(fmean(turn.read_tokens for turn in counted)),
        "others_cpu_share": all_of_it - own,
    }


def _times(case: Case, seen: Seen) -> list[float]:
    return [turn.ttft_s for turns in seen.conversations for turn in turns[case.first_turn :]]


def _different(arms: Iterable[Seen]) -> int:
    """Returns how many answers differ between arms: all say the same, so there should be none."""
    texts = ([turn.text for turns in seen.conversations for turn in turns] for seen in arms)
    return sum(len(set(answers)) > 1 for answers in zip(*texts, strict=False))


def problems(report: Mapping[str, Any]) -> list[str]:
    """Returns what must not be in a report. What simulated engines take says nothing."""
    found = [*report["failures"]]
    for name, case in report["cases"].items():
        if case["different_texts"]:
            found.append(f"{name}: {case['different_texts']} answers differ between arms")
        ratio = case["ratios"][SHIPPED]["value"]
        if not report["simulated"] and ratio < case["target"]:
            found.append(f"{name}: the first token is there {ratio:.2f} times as soon, not {case['target']:g}")
    others = others_share(report)
    if not report["simulated"] and others > _BUSY:
        found.append(f"others used up to {others:.0%} of the cores: these figures are provisional")
    return found


def others_share(report: Mapping[str, Any]) -> float:
    """Returns the largest share of the cores that others used during a case."""
    arms = (arm for case in report["cases"].values() for arm in case["arms"].values())
    return max((float(arm["others_cpu_share"]) for arm in arms), default=0.0)


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints the figures."""
    console.print(
        f"{report['engines']}; {report['machine']}; others used up to {others_share(report):.0%} of the cores",
        highlight=False,
    )
    names = [arm.name for arm in ARMS]
    table = Table(title="Time to the first token: median over turns, ms (how many times sooner than one-way)")
    table.add_column("P's cache, tokens")
    for column in (*names, "95 %", "target", "routes"):
        table.add_column(column, justify="right")
    for name, case in report["cases"].items():
        ratio = case["ratios"][SHIPPED]
        table.add_row(
            name,
            *(_cell(case, arm) for arm in names),
            f"{ratio['low']:.2f}-{ratio['high']:.2f}",
            f"{case['target']:g}" if case["target"] else "-",
            _routes(case["arms"][SHIPPED]["routes"]),
        )
    console.print(table)


def _cell(case: Mapping[str, Any], arm: str) -> str:
    milliseconds = f"{1000 * case['arms'][arm]['median_ttft_s']:.0f}"
    return milliseconds if arm == ONE_WAY else f"{milliseconds} ({case['ratios'][arm]['value']:.2f})"


def _routes(routes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {route}" for route, count in routes.items())
