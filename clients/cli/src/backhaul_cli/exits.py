"""Exit codes, and the errors that lead to them."""

from enum import IntEnum

import click

from backhaul_cli.output import plain
from backhaul_common.errors import (
    BackhaulError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)


class Exit(IntEnum):
    """How a command ended. Scripts go by these numbers: they do not change."""

    DONE = 0
    FAILED = 1
    """A service refused, or failed."""
    USAGE = 2
    """The command line is wrong (click's own)."""
    UNREACHABLE = 3
    """No service answers."""
    DENIED = 4
    """Not with this certificate or key."""
    NOT_FOUND = 5
    """There is no such node or conversation."""
    FOUND = 6
    """`doctor` found something that stops reuse."""
    INTERRUPTED = 130


_EXITS: dict[type[BackhaulError], Exit] = {
    UnavailableError: Exit.UNREACHABLE,
    DeadlineExceededError: Exit.UNREACHABLE,
    UnauthenticatedError: Exit.DENIED,
    PermissionDeniedError: Exit.DENIED,
    NotFoundError: Exit.NOT_FOUND,
}


class CommandError(click.ClickException):
    """Ends the command with a message and a code."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(plain(message))
        self.exit_code = int(code)  # type: ignore[misc]  # click itself reads it from the instance (core.py, ``main``)


def failed(error: BackhaulError) -> CommandError:
    """Returns what ends a command when a service said no."""
    wrong_files = isinstance(error, InvalidArgumentError) and error.reason == "TLS_FILES"
    return CommandError(str(error), Exit.USAGE if wrong_files else _EXITS.get(type(error), Exit.FAILED))
