"""The tests can fail: each does so for the mutants that `docs/invariants.md` names."""

import re
from pathlib import Path

import pytest

from tests.mutants.__main__ import all_mutants, main

INVARIANTS = Path(__file__).parents[1] / "docs" / "invariants.md"


@pytest.mark.timeout(2400)
def test_no_mutant_survives() -> None:
    assert main() == 0


def test_each_mutant_has_a_name_of_its_own_and_stands_in_the_document() -> None:
    names = [mutant.name for mutant in all_mutants()]
    assert len(names) == len(set(names))
    cells = [line.rsplit("|", 2)[1] for line in INVARIANTS.read_text().splitlines() if line.startswith("| ")]
    assert set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", "".join(cells))) == set(names)
