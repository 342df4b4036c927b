"""`backhaul top`: nodes as they work, live."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
from rich.live import Live
from rich.table import Table

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_cli.commands.blocks import STATES
from backhaul_cli.output import console, plain, print_json_line, table
from backhaul_cli.running import running
from backhaul_cli.services import Services, all_at_once
from backhaul_cli.settings import Seconds, Settings, with_settings
from backhaul_cli.views import ROLES
from backhaul_cli.views import STATES as NODE_STATES
from backhaul_common.errors import BackhaulError, UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """One node at one moment."""

    node_id: str
    role: str
    state: str
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Mean of its engines, 0 to 1."""
    held: int = 0
    claimed: int = 0
    held_tokens: int = 0
    problem: str = ""
    """Why its agent does not say; empty when it does."""


@click.command("top")
@click.option(
    "--every-s", default=2.0, show_default=True, type=Seconds(min=0.2, max=3600), help="Time between two looks."
)
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks; else Ctrl-C does.")
@with_settings
def top(settings: Settings, every_s: float, count: int | None) -> None:
    """Show what nodes have to do and what they hold, again and again.

    With --json each look is one line. What is no terminal gets each look below the one before. A look for which no
    registry answers says so, and the next one is tried; the first one ends the command.
    """
    with running(settings) as services:
        looks = _looks(services, every_s, count)
        screen = console()
        if settings.as_json:
            for look in looks:
                _print_json(look)
        elif screen.is_terminal:
            with Live(console=screen, auto_refresh=False, screen=count is None) as live:
                for look in looks:
                    live.update(_shown(look), refresh=True)
        else:
            for look in looks:
                screen.print(_shown(look))


def _looks(services: Services, every_s: float, count: int | None) -> Iterator[list[NodeLoad] | UnavailableError]:
    """Yields what is seen each time, or why nothing is."""
    yield _look(services)
    for _ in itertools.count() if count is None else range(count - 1):
        time.sleep(every_s)
        try:
            yield _look(services)
        except UnavailableError as error:
            yield error


def _look(services: Services) -> list[NodeLoad]:
    return list(all_at_once(lambda node: _load(services, node), services.nodes()))


def _print_json(look: list[NodeLoad] | UnavailableError) -> None:
    if isinstance(look, UnavailableError):
        click.echo(plain(str(look)), err=True)
    else:
        print_json_line([asdict(load) for load in look])


def _shown(look: list[NodeLoad] | UnavailableError) -> Table | str:
    if isinstance(look, UnavailableError):
        return f"{time.strftime('%H:%M:%S')}  {plain(str(look))}"
    return _table(look)


def _load(services: Services, node: registry_pb2.Node) -> NodeLoad:
    role, state = ROLES.get(node.role, "unknown"), NODE_STATES.get(node.state, "unknown")
    try:
        engines, sets = services.loads(node.agent_address), services.block_sets(node.agent_address)
    except BackhaulError as error:
        return NodeLoad(node_id=node.node_id, role=role, state=state, problem=str(error))
    return _summed(node.node_id, role, state, engines, sets)


def _summed(
    node_id: str, role: str, state: str, engines: list[agent_pb2.EngineLoad], sets: list[agent_pb2.BlockSet]
) -> NodeLoad:
    by_state = Counter(STATES.get(one.state, "?") for one in sets)
    return NodeLoad(
        node_id=node_id,
        role=role,
        state=state,
        running=sum(engine.running_count for engine in engines),
        waiting=sum(engine.waiting_count for engine in engines),
        kv_usage=sum(engine.kv_usage for engine in engines) / len(engines) if engines else 0.0,
        held=by_state["held"],
        claimed=by_state["claimed"],
        held_tokens=sum(one.token_count for one in sets),
    )


def _table(loads: list[NodeLoad]) -> Table:
    rows = [
        (
            load.node_id,
            load.role,
            load.state,
            load.running,
            load.waiting,
            f"{load.kv_usage:.0%}",
            load.held,
            load.claimed,
            f"{load.held_tokens:,}",
            load.problem,
        )
        for load in loads
    ]
    columns = ("node", "role", "state", "runs#", "waits#", "KV used#", "held#", "claimed#", "held tokens#", "problem")
    made = table(columns, rows)
    made.title = f"{time.strftime('%H:%M:%S')}  {len(loads)} nodes"
    made.title_justify = "left"
    return made
