"""`backhaul conversation ID`: what is held for the next turn of a conversation."""

from collections.abc import Iterable, Mapping

import click

from backhaul.agent.v1 import agent_pb2
from backhaul.router.v1 import conversation_pb2, conversation_pb2_grpc
from backhaul_cli.commands.blocks import STATES, complain, held_by, left
from backhaul_cli.exits import CommandError, Exit
from backhaul_cli.output import as_document, console, print_json, table
from backhaul_cli.running import running
from backhaul_cli.settings import Settings, with_settings


@click.command("conversation")
@click.argument("session_id", metavar="ID")
@click.option("--model", default="", help="Model of its turns; all that are served by default.")
@click.option("--cache-salt", default="", help="Cache salt that its turns carry.")
@with_settings
def conversation(settings: Settings, session_id: str, model: str, cache_salt: str) -> None:
    """Show where a conversation's block sets are; ID is its X-Session-ID.

    What is shown is now: nothing keeps the history of a conversation. The router must run with --explain.
    """
    request = conversation_pb2.FindConversationRequest(session_id=session_id, model=model, cache_salt=cache_salt)
    with running(settings) as services:
        found = services.at_the_router(
            lambda channel: conversation_pb2_grpc.ConversationServiceStub(channel).FindConversation(
                request, timeout=settings.timeout_s, metadata=services.metadata
            )
        ).held
        holders = {one.node_id for one in found}
        sets, problems = held_by(services, [node for node in services.nodes() if node.node_id in holders])
    if not found:
        raise CommandError(
            f"nothing is held for {session_id!r}: it is unknown, its last turn was aborted (a stop string is an "
            "abort), was released, is being read by another turn, or belongs to another tenant or model",
            Exit.NOT_FOUND,
        )
    owned = {(one.engine_id, one.set_id): one for _, one in sets}
    if settings.as_json:
        print_json(
            [
                {
                    **as_document(one),
                    "at_owner": as_document(owned[key]) if (key := (one.engine_id, one.set_id)) in owned else None,
                    "owner_problem": problems.get(one.node_id, ""),
                }
                for one in found
            ]
        )
    else:
        _print(found, owned, problems)
    complain(problems)


def _print(
    found: Iterable[conversation_pb2.HeldSet],
    owned: Mapping[tuple[str, str], agent_pb2.BlockSet],
    problems: dict[str, str],
) -> None:
    rows = []
    for one in found:
        mine = owned.get((one.engine_id, one.set_id))
        state = STATES.get(mine.state, "?") if mine else _missing(one, problems)
        rows.append((one.model, one.node_id, one.set_id, one.token_count or "-", state, left(mine) if mine else "-"))
    console().print(table(("model", "node", "block set", "tokens#", "state", "time left#"), rows))


def _missing(one: conversation_pb2.HeldSet, problems: dict[str, str]) -> str:
    if one.node_id in problems:
        return "unknown: its owner does not answer"
    return "cached: a second chance" if one.cached else "gone: read or released a moment ago"
