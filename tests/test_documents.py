"""The tests that documents name are there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_NAMED = re.compile(r"(?:def|class) (\w+)")


def names_of_tests() -> set[str]:
    return {name for path in TESTS for name in _NAMED.findall(path.read_text())}


def quoted(document: Path) -> Iterator[str]:
    """Yields what stands in backquotes."""
    yield from re.findall(r"`([^`\n]+)`", document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_document_names_is_there(document: Path) -> None:
    files, names = {path.name for path in TESTS}, names_of_tests()
    for text in quoted(document):
        mentioned = [file for file in re.findall(r"(\w+\.py)(?:::|$)", text) if file.startswith("test_")]
        assert set(mentioned) <= files, text
        assert {part for part in re.findall(r"::(\w+)", text) if not part.startswith("_")} <= names, text
