"""Pairs that could not exchange blocks are split up."""

from backhaul_router.core.health.pairs import Pairs
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.pairs_apart import PairsApartFilter
from backhaul_router.core.routing.target import Target
from tests.fakes.clock import FakeClock
from tests.unit.router.routing.targets import demand, ids, target

P1, P2, D1, D2 = (target(node_id) for node_id in ("p1", "p2", "d1", "d2"))


def kept(leg: Leg, targets: list[Target], *partners: Target, apart: list[tuple[Target, Target]]) -> list[str]:
    pairs = Pairs(FakeClock().monotonic)
    for reader, source in apart:
        pairs.read_failed(reader.node, source.node)
    return ids(PairsApartFilter(pairs).keep(demand(partners=partners), leg, targets))


def test_a_pair_that_could_not_exchange_is_split_up() -> None:
    assert kept(Leg.DECODE, [D1, D2], P1, apart=[(D1, P1)]) == ["d2"]
    assert kept(Leg.DECODE, [D1, D2], P1, apart=[(P1, D1)]) == ["d2"]
    assert kept(Leg.DECODE, [D1, D2], P2, apart=[(D1, P1)]) == ["d1", "d2"]


def test_a_pair_that_could_not_exchange_is_used_when_it_is_the_only_one() -> None:
    assert kept(Leg.DECODE, [D1], P1, apart=[(D1, P1)]) == ["d1"]


def test_a_reader_that_failed_a_moment_ago_is_not_asked() -> None:
    assert kept(Leg.READ, [P1, P2], D1, apart=[(P1, D1)]) == ["p2"]
    assert kept(Leg.READ, [P1], D1, apart=[(P1, D1)]) == []


def test_a_prompt_is_computed_where_somebody_can_take_it_from() -> None:
    assert kept(Leg.PREFILL, [P1, P2], D1, D2, apart=[(D1, P1)]) == ["p1", "p2"]
    assert kept(Leg.PREFILL, [P1, P2], D1, D2, apart=[(D1, P1), (D2, P1)]) == ["p2"]
    assert kept(Leg.PREFILL, [P1], D1, apart=[(D1, P1)]) == ["p1"]


def test_an_engine_that_cannot_take_it_anyhow_is_no_way_out() -> None:
    other = target("d3", compatibility_hash="x")
    assert kept(Leg.PREFILL, [P1, P2], D1, other, apart=[(D1, P1)]) == ["p2"]


def test_a_leg_without_partners_goes_anywhere() -> None:
    assert kept(Leg.ALONE, [D1], P1, apart=[(D1, P1)]) == ["d1"]
    assert kept(Leg.PREFILL, [P1], apart=[(D1, P1)]) == ["p1"]
