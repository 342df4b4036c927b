"""`backhaul nodes`: who is there."""

import click

from backhaul_cli.core.snapshot import Node
from backhaul_cli.output import as_document, console, print_json, span, table
from backhaul_cli.running import running
from backhaul_cli.settings import Settings, with_settings
from backhaul_cli.views import node as viewed


@click.command("nodes")
@with_settings
def nodes(settings: Settings) -> None:
    """List nodes and engines, and whether turns on them can reuse blocks."""
    with running(settings) as services:
        found = services.nodes()
    if settings.as_json:
        print_json([as_document(message) for message in found])
        return
    rows = [row for message in found for row in _rows(viewed(message))]
    console().print(
        table(("node", "role", "state", "rank#", "blocks#", "size#", "kept for#", "reuse", "models"), rows)
        if rows
        else "No node has joined."
    )


def _rows(node: Node) -> list[tuple[object, ...]]:
    state = f"{node.state}: {node.state_reason}" if node.state_reason else node.state
    models = ", ".join(node.models)
    if not node.engines:
        return [(node.node_id, node.role, state, "-", "-", "-", "-", "no: no engine is known", models)]
    return [
        (
            node.node_id,
            node.role,
            state,
            engine.rank,
            engine.block_count or "-",
            engine.block_size or "-",
            span(engine.retention_ttl_s) if engine.retention_ttl_s else "-",
            "yes" if engine.reuse else f"no: {engine.reuse_problem}",
            models,
        )
        for engine in node.engines
    ]
