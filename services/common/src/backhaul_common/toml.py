"""TOML files of operators."""

import tomllib
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """Parses a document. Raises ValueError saying what is wrong with it, and where."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
