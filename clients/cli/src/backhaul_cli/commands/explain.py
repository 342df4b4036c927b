"""`backhaul explain FILE`: how a turn would be served now, and why."""

from typing import BinaryIO

import click

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_cli.output import as_document, console, plain, print_json, table
from backhaul_cli.running import running
from backhaul_cli.settings import Settings, with_settings
from backhaul_common.durations import seconds

_APIS = {"chat": router_pb2.API_CHAT_COMPLETIONS, "completions": router_pb2.API_COMPLETIONS}


@click.command("explain")
@click.argument("body", metavar="FILE", type=click.File("rb"))
@click.option("--api", type=click.Choice(list(_APIS)), default="chat", show_default=True, help="API of the body.")
@click.option("--session-id", default="", help="X-Session-ID that the turn would carry.")
@with_settings
def explain(settings: Settings, body: BinaryIO, api: str, session_id: str) -> None:
    """Explain how a turn would go, without running it; FILE holds its JSON body (- for standard input).

    The router must run with --explain.
    """
    request = router_pb2.ExplainRequest(body=body.read(), session_id=session_id, api=_APIS[api])
    with running(settings) as services:
        answer = services.at_the_router(
            lambda channel: router_pb2_grpc.InferenceServiceStub(channel).Explain(
                request, timeout=settings.timeout_s, metadata=services.metadata
            )
        )
    if settings.as_json:
        print_json(as_document(answer))
        return
    click.echo(f"{answer.route or 'no route'}{f', because of {answer.miss_reason}' if answer.miss_reason else ''}")
    holder = f", {answer.held_token_count} of them held by {answer.holder_node_id}" if answer.holder_node_id else ""
    click.echo(f"{answer.prompt_token_count} prompt tokens, as estimated{holder}")
    columns = (
        "",
        "route",
        "prefill",
        "decode",
        "wait#",
        "prefill#",
        "move#",
        "penalty#",
        "total ms#",
        "cannot be gone",
    )
    console().print(table(columns, map(_way, answer.ways)))
    for leg in answer.legs:
        for removal in leg.removals:
            click.echo(plain(f"{leg.leg}: the filter {removal.filter} removed {', '.join(removal.engines)}"))


def _way(way: router_pb2.Way) -> tuple[object, ...]:
    parts = [way.estimate.wait, way.estimate.prefill, way.estimate.move, way.estimate.penalty, way.estimate.total]
    times = [f"{seconds(part) * 1000:.1f}" for part in parts] if way.HasField("estimate") else ["-"] * len(parts)
    chosen = "→" if way.chosen else ""
    return (chosen, way.route, way.prefill_node_id or "-", way.decode_node_id or "-", *times, way.reason)
