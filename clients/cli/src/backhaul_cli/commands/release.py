"""`backhaul release`: frees what is held."""

import click

from backhaul.agent.v1 import agent_pb2
from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_cli.completing import complete_node
from backhaul_cli.exits import CommandError, Exit
from backhaul_cli.output import as_document, counted, print_json
from backhaul_cli.running import running
from backhaul_cli.services import asked
from backhaul_cli.settings import Settings, with_settings

_MOST_IDS = 1_000


@click.command("release")
@click.option(
    "--conversation", "session_id", metavar="ID", help="All that is held for this conversation (X-Session-ID)."
)
@click.option("--model", default="", help="With --conversation: only of this model.")
@click.option("--cache-salt", default="", help="With --conversation: cache salt that its turns carry.")
@click.option("--node", "node_id", metavar="NODE", help="Owner of the block sets.", shell_complete=complete_node)
@click.argument("set_ids", metavar="[SET]...", nargs=-1)
@with_settings
def release(
    settings: Settings,
    session_id: str | None,
    model: str,
    cache_salt: str,
    node_id: str | None,
    set_ids: tuple[str, ...],
) -> None:
    """Free block sets before their time: those of a conversation, or some of one node.

    Sets that a turn is reading go when it is done with them. Nothing that is answered changes: later turns are cold.
    """
    if session_id is not None and not node_id and not set_ids:
        _end(settings, router_pb2.EndConversationRequest(session_id=session_id, model=model, cache_salt=cache_salt))
    elif session_id is None and node_id and 0 < len(set_ids) <= _MOST_IDS:
        _release(settings, node_id, set_ids)
    else:
        raise click.UsageError(f"give --conversation ID, or --node NODE and 1 to {_MOST_IDS} block sets")


def _end(settings: Settings, request: router_pb2.EndConversationRequest) -> None:
    with running(settings) as services:
        # The router itself takes up to ten seconds.
        timeout_s = max(12.0, settings.timeout_s)
        ended = services.at_the_router(
            lambda channel: router_pb2_grpc.InferenceServiceStub(channel).EndConversation(
                request, timeout=timeout_s, metadata=services.metadata
            )
        )
    if settings.as_json:
        print_json(as_document(ended))
    else:
        _say(ended.released_count, ended.deferred_count)


def _release(settings: Settings, node_id: str, set_ids: tuple[str, ...]) -> None:
    request = agent_pb2.ReleaseBlockSetsRequest(set_ids=set_ids)
    with running(settings) as services:
        owner = services.agent(services.node(node_id).agent_address)
        outcome = asked(lambda: owner.ReleaseBlockSets(request, timeout=settings.timeout_s))
    if settings.as_json:
        print_json(as_document(outcome))
    else:
        _say(len(outcome.released), len(outcome.deferred))
    if outcome.unknown:
        raise CommandError(f"{node_id} does not hold {', '.join(outcome.unknown)}", Exit.NOT_FOUND)


def _say(released: int, deferred: int) -> None:
    click.echo(f"Released: {counted(released, 'block set')}; {deferred} more go once they have been read.")
