"""`backhaul up`: the local stack, where `backhaul_local` is installed."""

import importlib.util
import os
import sys

import click

from backhaul_cli.exits import CommandError, Exit


@click.command(
    "up", context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
@click.argument("arguments", metavar="[OPTIONS]", nargs=-1, type=click.UNPROCESSED)
def up(arguments: tuple[str, ...]) -> None:
    """Run a whole stack on this machine until Ctrl-C: --simulated needs no vLLM; --help lists the options."""
    if importlib.util.find_spec("backhaul_local") is None:
        raise CommandError(
            "the local stack is not installed here: it is deploy/local of Backhaul's sources, which `make up` installs",
            Exit.FAILED,
        )
    sys.stdout.flush()
    # In place of this process: its signals and its exit code are then the stack's own.
    os.execv(sys.executable, [sys.executable, "-m", "backhaul_local", "up", *arguments])
