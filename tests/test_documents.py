"""The tests that documents name are there, in the files that they name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_NAMED = re.compile(r"(?:def|class) (\w+)")
_MENTIONED = re.compile(r"`([\w/-]*test_\w+\.py)?(?:::(\w+))?(?:\[[^`\n]*)?`")


def mentioned(document: Path) -> Iterator[tuple[str, str]]:
    """Yields files of tests with names in them, maybe empty; a name without a file is in the last one of its line."""
    for line in document.read_text().splitlines():
        file = ""
        for named, test in _MENTIONED.findall(line):
            file = named or file
            if named or test:
                yield file, test


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_document_names_is_there(document: Path) -> None:
    for file, test in mentioned(document):
        named = [path.read_text() for path in TESTS if file and f"/{path}".endswith(f"/{file}")]
        assert named, f"{file}::{test}"
        assert not test or any(test in _NAMED.findall(text) for text in named), f"{file}::{test}"
