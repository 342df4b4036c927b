"""What the node table says of who can serve a leg is worked out once, and anew when the table changes."""

from dataclasses import replace
from typing import Any

import pytest

from backhaul_router.core.nodes import NodeState, NodeTable, Role
from backhaul_router.core.routing import reach as module
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.reach import Reach
from backhaul_router.core.routing.target import Target
from tests.unit.router.routing.targets import demand, ids, target

P1, P2, D1, D2 = (target(name) for name in ("p1", "p2", "d1", "d2"))


def reach_of(*targets: Target) -> tuple[Reach, NodeTable]:
    table = NodeTable()
    table.replace(each.node for each in targets)
    return Reach(table), table


def paired(reach: Reach, leg: Leg, *partners: Target, **fields: Any) -> list[str]:
    return ids(reach.paired(leg, demand(partners=partners, **fields)))


def test_engines_of_another_build_are_out_of_reach() -> None:
    other = target("d3", weights_digest="other")
    reach, _ = reach_of(P1, D1, D2, other)
    assert paired(reach, Leg.DECODE, P1) == ["d1", "d2"]
    assert paired(reach, Leg.READ, other) == []
    assert paired(reach, Leg.PREFILL, D1, other) == ["p1"]
    assert paired(reach, Leg.PREFILL, other) == []
    assert paired(reach, Leg.ALONE) == ["d1", "d2", "d3"]


def test_what_the_table_says_now_counts() -> None:
    reach, table = reach_of(P1, D1, D2)
    assert paired(reach, Leg.DECODE, P1) == ["d1", "d2"]
    table.change([replace(D1.node, state=NodeState.NOT_READY)], [])
    assert paired(reach, Leg.DECODE, P1) == ["d2"]
    assert ids(reach.able(Role.DECODE, "m")) == ["d2"]


def test_a_partner_that_has_changed_is_another_one() -> None:
    reach, _ = reach_of(P1, D1, D2)
    assert paired(reach, Leg.DECODE, P1) == ["d1", "d2"]
    assert paired(reach, Leg.DECODE, target("p1", weights_digest="other")) == []


def test_equal_answers_are_the_same_object() -> None:
    reach, _ = reach_of(P1, P2, D1, D2)
    answers = {id(reach.paired(Leg.DECODE, demand(partners=(partner,)))) for partner in (P1, P2)}
    assert answers == {id(reach.able(Role.DECODE, "m"))}


def test_no_more_answers_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 1)
    reach, _ = reach_of(P1, P2, D1)
    assert [paired(reach, Leg.DECODE, partner) for partner in (P1, P2, P1)] == [["d1"]] * 3
