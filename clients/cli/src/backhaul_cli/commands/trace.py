"""`backhaul trace ID`: what can be known of a turn without a store of traces."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from backhaul_cli.commands.blocks import STATES, complain, held_by, left
from backhaul_cli.exits import CommandError, Exit
from backhaul_cli.output import as_document, console, plain, print_json, table
from backhaul_cli.running import running
from backhaul_cli.settings import Settings, with_settings

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
    with running(settings) as services:
        held, problems = held_by(services, services.nodes())
    sets = [(node_id, one) for node_id, one in held if turn_id in one.set_id]
    lines = [line for path in logs for line in _lines(path, turn_id)]
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


def _lines(path: Path, turn_id: str) -> Iterator[tuple[Path, str]]:
    """Yields lines that name the turn, or the trace of a line that does."""
    traces = {turn_id}
    with path.open(encoding="utf-8", errors="replace") as log:
        matching = [line[:_MOST_LINE_CHARS].rstrip("\n") for line in log if turn_id in line]
    traces |= set(filter(None, map(_trace_of, matching)))
    with path.open(encoding="utf-8", errors="replace") as log:
        found = (line[:_MOST_LINE_CHARS].rstrip("\n") for line in log if any(one in line for one in traces))
        for _, line in zip(range(_MOST_LINES), found, strict=False):
            yield path, line


def _trace_of(line: str) -> str:
    """Returns the trace id of a line that is JSON or ``key=value``; empty where there is none."""
    document: Any = None
    if line.startswith("{"):
        try:
            document = json.loads(line)
        except ValueError:
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
