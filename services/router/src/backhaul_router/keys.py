"""Makes API keys and their hashes: ``backhaul-router-key``."""

import argparse
import hashlib
import secrets
import sys
from collections.abc import Sequence

_PREFIX = "bhk_"
"""By which scanners can tell a key that has got where it should not be."""
_RANDOM_BYTES = 32
_SHORTEST = 32
"""Characters of a key that is no password; 128 bits, when they are random hex digits."""


def new_key() -> str:
    """Returns a random key of 256 bits."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def line_for(key: str) -> str:
    """Returns the line of a tenants file that lets a key in.

    SHA-256 is enough for what nobody can guess; what somebody chose could be found by trying. Raises ValueError for a
    key that looks like it.
    """
    if len(key) < _SHORTEST or len(set(key)) < _SHORTEST // 4:
        raise ValueError(
            f"a key must be random, and have at least {_SHORTEST} characters: its hash would give away one that can "
            "be guessed. Without --stdin this command makes one"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("a key must consist of printable ASCII characters without spaces, as it goes into a header")
    return f'key_sha256 = ["{hashlib.sha256(key.encode()).hexdigest()}"]'


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a new key and its line, or the line of a key that comes on standard input; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="backhaul-router-key",
        description="Makes a key, for a tenant, and the line for its table in the router's tenants file. "
        "The key is printed this once and kept nowhere.",
    )
    parser.add_argument("--stdin", action="store_true", help="read a key instead of making one, print only its line")
    options = parser.parse_args(argv)
    key = sys.stdin.readline().strip() if options.stdin else new_key()
    try:
        line = line_for(key)
    except ValueError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    sys.stdout.write(line + "\n" if options.stdin else f"{key}\n{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
