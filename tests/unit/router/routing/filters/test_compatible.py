"""Both legs of a turn go to engines that can exchange blocks."""

from typing import Any

import pytest

from backhaul_router.core.nodes import compatible
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.compatible import CompatibleFilter
from backhaul_router.core.routing.target import Target
from tests.unit.router.routing.targets import demand, ids, target

FIT = [
    ({}, True),
    ({"compatibility_hash": "x"}, False),
    ({"compatibility_hash": ""}, True),
    ({"weights_digest": "x"}, False),
    ({"weights_digest": ""}, True),
    ({"block_size": 32}, False),
    ({"block_size": 0}, True),
    ({"engines": ()}, True),
    ({"engine_id": "p1-engine"}, False),
    ({"engine_url": "http://p1:2"}, False),
]


def kept(leg: Leg, targets: list[Target], *partners: Target) -> list[str]:
    return ids(CompatibleFilter().keep(demand(partners=partners), leg, targets))


@pytest.mark.parametrize(("other", "fits"), FIT)
def test_a_hand_off_goes_to_engines_that_can_take_it(other: dict[str, Any], fits: bool) -> None:
    assert bool(kept(Leg.DECODE, [target("d1", **other)], target("p1"))) is fits
    assert compatible(target("p1").node, target("d1", **other).node) is fits


@pytest.mark.parametrize(("other", "fits"), [({"block_size": 32}, False), ({"block_size": 0}, True)])
def test_blocks_of_another_size_are_not_read(other: dict[str, Any], fits: bool) -> None:
    assert bool(kept(Leg.READ, [target("p1", **other)], target("d1"))) is fits


SIZES = [
    # Prefill, decode and KV heads; whether decode can take what prefill hands off, and prefill read it back.
    pytest.param(1, 1, 8, True, True, id="equal"),
    pytest.param(8, 8, 4, True, True, id="equal, more ranks than heads"),
    pytest.param(4, 1, 8, True, True, id="decode has fewer"),
    pytest.param(1, 4, 8, True, True, id="decode has more"),
    pytest.param(4, 6, 12, False, False, id="neither is a multiple"),
    pytest.param(8, 2, 4, False, False, id="decode has fewer, prefill repeats heads"),
    pytest.param(2, 8, 4, True, False, id="decode has more and repeats heads"),
    pytest.param(2, 8, 0, True, True, id="heads not known, or not divided"),
    pytest.param(0, 6, 4, True, True, id="size not known"),
]


@pytest.mark.parametrize(("prefill", "decode", "heads", "handed_off", "read_back"), SIZES)
def test_engines_of_unequal_tensor_parallel_sizes_fit_where_vllm_lets_them(
    prefill: int, decode: int, heads: int, handed_off: bool, read_back: bool
) -> None:
    p = target("p1", tp_size=prefill, kv_head_count=heads)
    d = target("d1", tp_size=decode, kv_head_count=heads)
    assert bool(kept(Leg.DECODE, [d], p)) is handed_off
    assert bool(kept(Leg.PREFILL, [p], d)) is handed_off
    assert bool(kept(Leg.READ, [p], d)) is read_back
    assert compatible(p.node, d.node) is handed_off


def test_a_hand_off_is_the_engines_own_matter_whatever_connectors_they_have() -> None:
    assert kept(
        Leg.DECODE, [target("d1", connector_version="2"), target("d2", connector_version="")], target("p1")
    ) == [
        "d1",
        "d2",
    ]


def test_what_is_held_is_read_with_the_connector_that_retained_it() -> None:
    readers = [
        target("p1"),
        target("p2", connector_version="2"),
        target("p3", connector_version=""),
        target("p4", reuse=False),
        target("p5", engines=()),
    ]
    assert kept(Leg.READ, readers, target("d1")) == ["p1"]


def test_what_a_holder_without_the_connector_caches_is_read_by_any_that_verifies() -> None:
    readers = [target("p1"), target("p2", connector_version="2")]
    assert kept(Leg.READ, readers, target("d1", connector_version="")) == ["p1", "p2"]


def test_the_holder_is_the_partner_of_a_read() -> None:
    asked = demand(holder=target("d1", compatibility_hash="x"))
    readers = [target("p1"), target("p2", compatibility_hash="x")]
    assert ids(CompatibleFilter().keep(asked, Leg.READ, readers)) == ["p2"]


def test_nobody_reads_what_nobody_holds() -> None:
    assert kept(Leg.READ, [target("p1")]) == []


def test_a_prompt_is_computed_where_at_least_one_decode_engine_can_take_it_from() -> None:
    prefills = [target("p1", compatibility_hash="x"), target("p2", compatibility_hash="y"), target("p3")]
    decodes = [target("d1", compatibility_hash="y"), target("d2", compatibility_hash="x")]
    assert kept(Leg.PREFILL, prefills, *decodes) == ["p1", "p2"]


def test_engines_of_one_server_are_no_partners_though_others_of_its_build_are() -> None:
    both = target("p1", engine_url="http://d1:2")
    assert kept(Leg.PREFILL, [both], target("d1")) == []
    assert kept(Leg.PREFILL, [both], target("d1"), target("d2")) == ["p1"]


def test_a_leg_without_partners_goes_anywhere() -> None:
    assert kept(Leg.ALONE, [target("d1")], target("p1", compatibility_hash="x")) == ["d1"]
    assert kept(Leg.PREFILL, [target("p1")]) == ["p1"]
