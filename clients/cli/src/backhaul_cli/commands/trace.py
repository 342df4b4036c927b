"""`backhaul trace ID`: what can be known of a turn without a store of traces."""

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from backhaul.agent.v1 import agent_pb2
from backhaul_cli.commands.blocks import STATES, complain, held_by, left
from backhaul_cli.exits import CommandError, Exit
from backhaul_cli.output import as_document, console, plain, print_json, table
from backhaul_cli.running import running
from backhaul_cli.settings import Settings, with_settings
from backhaul_common.errors import UnavailableError

_MOST_LINES = 1_000
_MOST_LINE_CHARS = 4_096


@click.command("trace")
@click.argument("turn_id", metavar="ID")
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Log of a router, agent or registry to look in; may be given several times.",
)
@with_settings
def trace(settings: Settings, turn_id: str, logs: tuple[Path, ...]) -> None:
    """Show what is known of a turn: ID is an x-request-id, a trace id, or an engine's request id (a block set's).

    Services keep nothing of a turn that is over but what it left in an engine. So this shows the block sets of that
    name, and lines of the logs that are given. A line's trace_id leads to the whole trace where traces are exported.
    """
    held, problems = _held(settings)
    sets = [(node_id, one) for node_id, one in held if turn_id in one.set_id]
    lines = list(_lines(logs, turn_id))
    if settings.as_json:
        print_json(
            {
                "block_sets": [{"node_id": node_id, **as_document(one)} for node_id, one in sets],
                "log_lines": [{"file": str(path), "line": line} for path, line in lines],
                "unreachable": problems,
            }
        )
    else:
        _print(sets, lines)
    complain(problems)
    if not sets and not lines:
        raise CommandError(_nothing(turn_id, looked_in_logs=bool(logs)), Exit.NOT_FOUND)


def _held(settings: Settings) -> tuple[list[tuple[str, agent_pb2.BlockSet]], dict[str, str]]:
    """Returns what nodes hold, and why some do not say; logs tell what they know when no registry answers, too."""
    with running(settings) as services:
        try:
            return held_by(services, services.nodes())
        except UnavailableError as error:
            return [], {"directory": str(error)}


def _lines(paths: Sequence[Path], turn_id: str) -> Iterator[tuple[Path, str]]:
    """Yields lines that name the turn, or the trace of a line in any of the logs that does."""
    traces = {turn_id}
    for path in paths:
        traces |= set(filter(None, map(_trace_of, _matching(path, {turn_id}))))
    for path in paths:
        for line in itertools.islice(_matching(path, traces), _MOST_LINES):
            yield path, line


def _matching(path: Path, words: Collection[str]) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            if any(word in line for word in words):
                yield line[:_MOST_LINE_CHARS].rstrip("\n")


def _trace_of(line: str) -> str:
    """Returns the trace id of a line that is JSON or ``key=value``; empty where there is none."""
    document: Any = None
    if line.startswith("{"):
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            document = None
    if isinstance(document, dict):
        return str(document.get("trace_id") or "")
    _, _, rest = line.partition("trace_id=")
    return rest.split()[0].strip("'\"") if rest.strip() else ""


def _print(sets: Iterable[tuple[str, Any]], lines: Iterable[tuple[Path, str]]) -> None:
    rows = [(node_id, one.set_id, STATES.get(one.state, "?"), one.token_count, left(one)) for node_id, one in sets]
    if rows:
        console().print(table(("node", "block set", "state", "tokens#", "time left#"), rows))
    for path, line in lines:
        click.echo(f"{path.name}: {plain(line)}")


def _nothing(turn_id: str, *, looked_in_logs: bool) -> str:
    where = "" if looked_in_logs else " Give the services' logs with --log, or look it up where traces are exported to."
    return f"no node holds anything of {turn_id!r}{', and no log names it' if looked_in_logs else ''}.{where}"
