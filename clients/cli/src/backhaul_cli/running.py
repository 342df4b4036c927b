"""What is around every command that asks services."""

from collections.abc import Iterator
from contextlib import contextmanager

from backhaul_cli.exits import failed
from backhaul_cli.services import Services
from backhaul_cli.settings import Settings
from backhaul_common.errors import BackhaulError


@contextmanager
def running(settings: Settings) -> Iterator[Services]:
    """Opens the services; what they refuse ends the command with a message and a code."""
    try:
        with Services(settings) as services:
            yield services
    except BackhaulError as error:
        raise failed(error) from error
