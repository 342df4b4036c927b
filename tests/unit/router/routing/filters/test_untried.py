"""What failed a turn is not asked again for it."""

import pytest

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.untried import UntriedFilter
from tests.unit.router.routing.targets import demand, ids, target


@pytest.mark.parametrize(
    ("tried", "kept"), [(set(), ["d1", "d2"]), ({"d1"}, ["d2"]), ({"d1", "d2"}, ["d1", "d2"]), ({"p1"}, ["d1", "d2"])]
)
def test_nodes_that_failed_this_turn_are_used_when_there_is_no_other(tried: set[str], kept: list[str]) -> None:
    asked = demand(tried=frozenset(tried))
    assert ids(UntriedFilter().keep(asked, Leg.DECODE, [target("d1"), target("d2")])) == kept
