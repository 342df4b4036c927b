"""`backhaul blocks`: what owners hold."""

from collections.abc import Iterable
from typing import Any

import click

from backhaul.agent.v1 import agent_pb2
from backhaul.registry.v1 import registry_pb2
from backhaul_cli.completing import complete_node
from backhaul_cli.exits import CommandError, Exit
from backhaul_cli.output import as_document, console, counted, print_json, span, table
from backhaul_cli.running import running
from backhaul_cli.services import Services, all_at_once
from backhaul_cli.settings import Settings, with_settings
from backhaul_common.durations import seconds
from backhaul_common.errors import BackhaulError

STATES = {
    agent_pb2.BLOCK_SET_STATE_FENCED: "fenced",
    agent_pb2.BLOCK_SET_STATE_HELD: "held",
    agent_pb2.BLOCK_SET_STATE_CLAIMED: "claimed",
    agent_pb2.BLOCK_SET_STATE_RELEASING: "releasing",
}


@click.command("blocks")
@click.argument("node_ids", metavar="[NODE]...", nargs=-1, shell_complete=complete_node)
@with_settings
def blocks(settings: Settings, node_ids: tuple[str, ...]) -> None:
    """List the block sets that nodes hold: all nodes, or those that are named."""
    with running(settings) as services:
        asked = [services.node(node_id) for node_id in node_ids] or services.nodes()
        held, problems = held_by(services, asked)
    if settings.as_json:
        print_json({"block_sets": [_document(node_id, one) for node_id, one in held], "unreachable": problems})
    else:
        _print(held)
    complain(problems)


def held_by(
    services: Services, nodes: Iterable[registry_pb2.Node]
) -> tuple[list[tuple[str, agent_pb2.BlockSet]], dict[str, str]]:
    """Returns what nodes hold, and by node why some do not say."""
    asked = list(nodes)

    def of(node: registry_pb2.Node) -> list[agent_pb2.BlockSet] | str:
        try:
            return services.block_sets(node.agent_address)
        except BackhaulError as error:
            return str(error)

    held: list[tuple[str, agent_pb2.BlockSet]] = []
    problems: dict[str, str] = {}
    for node, answer in zip(asked, all_at_once(of, asked), strict=True):
        if isinstance(answer, str):
            problems[node.node_id] = answer
        else:
            held += [(node.node_id, one) for one in answer]
    return held, problems


def complain(problems: dict[str, str]) -> None:
    """Ends the command with `Exit.UNREACHABLE` when some nodes did not say what they hold."""
    if problems:
        told = "; ".join(f"{node_id}: {why}" for node_id, why in problems.items())
        raise CommandError(f"not all nodes say what they hold: {told}", Exit.UNREACHABLE)


def _document(node_id: str, one: agent_pb2.BlockSet) -> dict[str, Any]:
    return {"node_id": node_id, **as_document(one)}


def _print(held: list[tuple[str, agent_pb2.BlockSet]]) -> None:
    if not held:
        console().print("Nothing is held.")
        return
    rows = [
        (node_id, one.set_id, STATES.get(one.state, "?"), one.token_count, one.block_count, left(one))
        for node_id, one in held
    ]
    console().print(table(("node", "block set", "state", "tokens#", "blocks#", "time left#"), rows))
    sets, tokens = counted(len(held), "block set"), counted(sum(one.token_count for _, one in held), "token")
    click.echo(f"{sets}, {tokens}. Blocks that sets share count in each.")


def left(one: agent_pb2.BlockSet) -> str:
    """Returns the time until the engine lets go of a set, unless it is renewed."""
    return span(seconds(one.remaining_ttl))
