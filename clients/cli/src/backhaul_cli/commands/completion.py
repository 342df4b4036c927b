"""`backhaul completion SHELL`: what a shell needs to complete commands, options and nodes."""

import click
from click.shell_completion import get_completion_class

from backhaul_cli.exits import CommandError, Exit

_VARIABLE = "_BACKHAUL_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell: `eval "$(backhaul completion bash)"`."""
    found = get_completion_class(shell)
    if found is None:
        raise CommandError(f"click completes nothing in {shell}", Exit.FAILED)
    click.echo(found(context.find_root().command, {}, "backhaul", _VARIABLE).source())
