"""Turns go to nodes that serve what they name."""

from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.model import ModelFilter
from tests.unit.router.routing.targets import demand, ids, target

BASE, ADAPTED = target("d1"), target("d2", models=frozenset({"m", "m-lora"}))


def test_a_turn_goes_to_nodes_that_serve_its_model() -> None:
    assert ids(ModelFilter().keep(demand(), Leg.DECODE, [BASE, ADAPTED])) == ["d1", "d2"]
    assert ids(ModelFilter().keep(demand(model="another"), Leg.DECODE, [BASE, ADAPTED])) == []


def test_a_turn_that_names_an_adapter_goes_to_nodes_that_have_it() -> None:
    assert ids(ModelFilter().keep(demand(model="m-lora"), Leg.DECODE, [BASE, ADAPTED])) == ["d2"]
