"""What a mutant is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    name: str
    module: str
    """File below the repository's root."""
    old: str
    """Text that stands exactly once in the module."""
    new: str
    tests: tuple[str, ...]
    """Test ids; each of them must fail."""
    fixtures: bool = False
    """Whether the tests need the fixtures of tests/conftest.py."""
