"""`backhaul drain NODE`: takes a node out of service."""

import time

import click

from backhaul.agent.v1 import agent_pb2
from backhaul_cli.completing import complete_node
from backhaul_cli.output import as_document, counted, print_json, print_json_line, span
from backhaul_cli.running import running
from backhaul_cli.services import asked
from backhaul_cli.settings import Seconds, Settings, with_settings
from backhaul_common.durations import duration, seconds

_LOOK_S = 1.0


@click.command("drain")
@click.argument("node_id", metavar="NODE", shell_complete=complete_node)
@click.option(
    "--within-s",
    type=Seconds(min=0, max=86_400),
    help="Time until the node leaves, whatever still runs; the agent's own limit by default.",
)
@click.option("--wait", is_flag=True, help="Wait until it has left the directory.")
@with_settings
def drain(settings: Settings, node_id: str, within_s: float | None, wait: bool) -> None:
    """Take a node out of service: it gets no new turns, lets go of what it holds, and leaves.

    There is no way back but to restart its agent. Asked again, this says how far it is, while the node is listed.
    """
    request = agent_pb2.DrainRequest() if within_s is None else agent_pb2.DrainRequest(timeout=duration(within_s))
    with running(settings) as services:
        owner = services.agent(services.node(node_id).agent_address)
        while True:
            answer = asked(lambda: owner.Drain(request, timeout=settings.timeout_s))
            left = answer.phase == agent_pb2.DRAIN_PHASE_LEFT
            _say(settings, node_id, answer, left=left, goes_on=wait)
            if left or not wait:
                return
            time.sleep(_LOOK_S)


def _say(settings: Settings, node_id: str, answer: agent_pb2.DrainResponse, *, left: bool, goes_on: bool) -> None:
    if settings.as_json:
        (print_json_line if goes_on else print_json)({"node_id": node_id, **as_document(answer)})
    elif left:
        click.echo(f"{node_id} has left. Its engine and its agent may be stopped.")
    else:
        runs, held = counted(answer.running_count, "request"), counted(answer.remaining_count, "block set")
        left_in = span(seconds(answer.remaining_time))
        click.echo(f"{node_id} drains: {runs} to finish, {held} to let go; it leaves in {left_in} at the latest.")
