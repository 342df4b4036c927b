"""Every reason for a cold turn is explained."""

import pytest

from backhaul_router.core import misses
from backhaul_router.core.console.reasons import REASONS, reason_for

WORDS = {value for name, value in vars(misses).items() if name.isupper() and isinstance(value, str)}
NAMES = {word for word in WORDS if not word.endswith(":")}
"""Words that end in a colon begin reasons."""


@pytest.mark.parametrize("miss", sorted(NAMES | {miss for miss in misses.SECOND_CHANCE if ":" in miss}))
def test_every_reason_that_the_router_gives_has_a_meaning_of_its_own(miss: str) -> None:
    assert miss in REASONS


@pytest.mark.parametrize("miss", ["claim:made_up", "harvest:made_up", "refused:made_up"])
def test_a_reason_that_a_peer_made_up_is_explained_by_its_kind(miss: str) -> None:
    assert reason_for(miss).remedy


def test_a_reason_that_nobody_knows_leads_to_the_documents() -> None:
    assert "docs/" in reason_for("made_up").meaning


def test_no_two_reasons_have_the_same_meaning() -> None:
    assert len({reason.meaning for reason in REASONS.values()}) == len(REASONS)
