"""Legs go to nodes of the role that they need."""

import pytest

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.role import RoleFilter
from tests.unit.router.routing.targets import demand, ids, target


@pytest.mark.parametrize(
    ("leg", "kept"), [(Leg.PREFILL, ["p1"]), (Leg.READ, ["p1"]), (Leg.DECODE, ["d1"]), (Leg.ALONE, ["d1"])]
)
def test_a_leg_goes_to_nodes_of_its_role(leg: Leg, kept: list[str]) -> None:
    assert ids(RoleFilter().keep(demand(), leg, [target("p1"), target("d1")])) == kept
