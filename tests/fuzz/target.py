"""One parser under fuzz."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.inputs import Source


@dataclass(frozen=True, slots=True)
class Target:
    """A parser, what it is given, and what it must keep to."""

    name: str
    reads: tuple[str, ...]
    """Where bytes are taken apart: ``module:name``, as `sites` finds them in the source."""
    inputs: Source[Any]
    accepts: Callable[[Any], bool]
    """Tells whether an input is taken. Raises for nothing but a fault: parsers refuse by errors that it knows."""
