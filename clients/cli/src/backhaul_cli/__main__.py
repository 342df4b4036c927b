"""The command `backhaul`."""

import logging
import os
import sys

import click

from backhaul_cli.commands.blocks import blocks
from backhaul_cli.commands.completion import completion
from backhaul_cli.commands.conversation import conversation
from backhaul_cli.commands.doctor import doctor
from backhaul_cli.commands.drain import drain
from backhaul_cli.commands.explain import explain
from backhaul_cli.commands.nodes import nodes
from backhaul_cli.commands.release import release
from backhaul_cli.commands.top import top
from backhaul_cli.commands.trace import trace
from backhaul_cli.commands.up import up
from backhaul_cli.exits import Exit


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="backhaul-cli", prog_name="backhaul")
def cli() -> None:
    """See what Backhaul holds and why turns are cold; take nodes out of service.

    Where services are, and what they are shown, every command takes as options or from BACKHAUL_CLI_... in the
    environment.

    Exit codes: 0 done, 1 a service refused or failed, 2 wrong command line, 3 no service answers, 4 not with this
    certificate or key, 5 no such node or conversation, 6 doctor found what stops reuse, 130 interrupted.
    """


for _command in (up, nodes, blocks, conversation, top, trace, drain, release, explain, doctor, completion):
    cli.add_command(_command)


def main() -> None:
    """Runs the command line and ends the process."""
    # gRPC's C core writes to standard error whatever it cannot connect to.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.disable(logging.WARNING)
    try:
        sys.exit(cli.main(prog_name="backhaul", standalone_mode=False) or Exit.DONE)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(Exit.INTERRUPTED)
    except OSError as error:
        # Standard output is full or gone. What is left in its buffer would fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"Error: cannot write: {error.strerror}", err=True)
        sys.exit(Exit.FAILED)


if __name__ == "__main__":
    main()
