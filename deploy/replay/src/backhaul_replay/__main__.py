"""Plays a trace of turns in virtual time and prints what each retention policy would save."""

import argparse
import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import MISSING, fields
from pathlib import Path

from backhaul_node_agent.core.retention.gaps import Gaps
from backhaul_replay.agent import Budget
from backhaul_replay.bound import BoundError, most_tokens
from backhaul_replay.hardware import Hardware
from backhaul_replay.policies import contenders
from backhaul_replay.replay import replay
from backhaul_replay.report import Row, as_json, as_table, heading, remarks
from backhaul_replay.synthetic import SHAPES
from backhaul_replay.trace import Trace, TraceError, parse, render

_NOTES = """
"turns" ended within {seconds:,.0f} s; "hits" reused something, of all turns that had one before them.
"saved" are prefill tokens: by sets that were pinned, by blocks that the prefix cache still had (second chances), both.
"of prompts" is that share of all tokens of prompts. "pinned" are blocks. "delayed" are turns that waited for blocks of
the decode engine while any were pinned, and for how long, all together.
The bound knows the future: the most tokens that pinning {budget:,} blocks ({share:.0%} of all) can save at these very
turn times, each set kept from its turn's end to the next one or not at all (linear relaxation of the packing of
intervals); what the prefix cache saves besides is not in it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        trace = _trace(arguments)
        hardware = Hardware(**{field.name: getattr(arguments, field.name) for field in fields(Hardware)})
        budget = Budget(arguments.retained_share, arguments.pressure_mark)
        if arguments.write:
            arguments.write.write_text("\n".join(render(trace)) + "\n")
            return 0
        rows = _compare(trace, hardware, budget, arguments.max_retention_s, _learnt(arguments, hardware, budget))
    except (TraceError, BoundError, ValueError, OSError) as error:
        print(f"backhaul-replay: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    for remark in remarks(trace, rows) if arguments.json else ():
        print(f"backhaul-replay: {remark}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(as_json(trace, rows), indent=2))
        return 0
    print(heading(_name(arguments), trace, hardware, budget, arguments.max_retention_s))
    print(as_table(trace, rows))
    for remark in remarks(trace, rows):
        print(f"\n{remark}")
    most = int(hardware.block_count * budget.share)
    print(_NOTES.format(seconds=trace.end_s, budget=most, share=budget.share))
    return 0


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.trace is None:
        return SHAPES[arguments.synthetic or "agents"](arguments.seed)
    try:
        with arguments.trace.open() as lines:
            return parse(lines)
    except UnicodeDecodeError as error:
        raise TraceError(f"{arguments.trace} is not text: {error}") from None
    except TraceError as error:
        raise TraceError(f"{arguments.trace}: {error}") from None


def _name(arguments: argparse.Namespace) -> str:
    learnt = "" if arguments.learn_seed is None else f", gaps learnt on seed {arguments.learn_seed}"
    drawn = f"synthetic {arguments.synthetic or 'agents'}, seed {arguments.seed}"
    return (str(arguments.trace) if arguments.trace else drawn) + learnt


def _learnt(arguments: argparse.Namespace, hardware: Hardware, budget: Budget) -> Gaps:
    """Returns what an agent knows of gaps before the trace begins: as the seed to learn from has taught it."""
    gaps = Gaps()
    if arguments.learn_seed is not None:
        if arguments.trace:
            raise ValueError("--learn-seed is for drawn traces: gaps of another load are of no use")
        teacher = next(each for each in contenders(arguments.max_retention_s) if each.name == "benefit")
        print(f"learning on seed {arguments.learn_seed} ...", file=sys.stderr)
        replay(SHAPES[arguments.synthetic or "agents"](arguments.learn_seed), teacher, hardware, budget, gaps=gaps)
    return gaps


def _compare(trace: Trace, hardware: Hardware, budget: Budget, max_retention_s: float, learnt: Gaps) -> list[Row]:
    rows = []
    for contender in contenders(max_retention_s):
        print(f"playing {contender.name} ...", file=sys.stderr)
        outcome = replay(trace, contender, hardware, budget, gaps=deepcopy(learnt))
        most = most_tokens(outcome.intervals, int(hardware.block_count * budget.share)) if contender.budget else None
        rows.append(Row(contender.name, outcome, most))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="backhaul-replay", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("trace", nargs="?", type=Path, help="JSON lines, one turn each; see docs/retention.md")
    source.add_argument("--synthetic", choices=sorted(SHAPES), help="a drawn trace of this shape in its place (agents)")
    parser.add_argument("--seed", type=int, default=1, help="number from which the trace is drawn (1)")
    parser.add_argument(
        "--learn-seed",
        type=int,
        metavar="SEED",
        help="play the trace of this seed first, so that the agent has learnt its gaps (none: it knows nothing)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the trace there and stop")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for field in fields(Hardware):
        assert field.default is not MISSING
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            flag,
            type=type(field.default),
            default=field.default,
            help=f"{field.metadata['meaning']} ({field.default:g})",
        )
    parser.add_argument(
        "--retained-share", type=float, default=0.5, help="share of all blocks that sets may pin, 0 to 1 (0.5)"
    )
    parser.add_argument(
        "--pressure-mark",
        type=float,
        default=0.9,
        help="share of all blocks in use, 0 to 1, above which sets give way (0.9)",
    )
    parser.add_argument(
        "--max-retention-s", type=float, default=1_800.0, help="seconds that a set is kept at most (1800)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
