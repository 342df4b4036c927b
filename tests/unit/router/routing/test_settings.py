"""The routing file."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from backhaul_router.core.health.breakers import Breakers, BreakerSettings
from backhaul_router.core.health.pairs import Pairs
from backhaul_router.core.load import Load
from backhaul_router.core.nodes import NodeState
from backhaul_router.core.routing.catalogue import FILTERS, PICKERS, REQUIRED, SCORERS
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.estimates import Estimator
from backhaul_router.core.routing.explanation import BUSY_FILTERS, ProfileExplanation
from backhaul_router.core.routing.live import Live
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.recency import Recency
from backhaul_router.core.routing.reports import EngineReport, Reports
from backhaul_router.core.routing.settings import RoutingSettings, ScorerSettings, parse_routing, profiles
from backhaul_router.core.routing.shortlist import Shortlist
from tests.fakes.clock import FakeClock
from tests.unit.router.routing.targets import demand, target

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "deploy" / "routing.example.toml"
GUIDE = ROOT / "docs" / "routing.md"


def live() -> Live:
    monotonic, rng = FakeClock().monotonic, random.Random(7)
    load, costs, prefixes, reports = Load(monotonic), Costs(monotonic), Prefixes(), Reports(monotonic)
    recency = Recency()
    return Live(
        load=load,
        costs=costs,
        prefixes=prefixes,
        reports=reports,
        breakers=Breakers(monotonic, rng, BreakerSettings()),
        pairs=Pairs(monotonic),
        recency=recency,
        estimator=Estimator(load, costs, prefixes, reports, disturbance=0.1),
        shortlist=Shortlist(monotonic, prefixes, recency),
        rng=rng,
    )


def test_an_empty_file_is_all_defaults() -> None:
    assert parse_routing("") == RoutingSettings()


def test_the_example_says_what_the_defaults_are() -> None:
    assert parse_routing(EXAMPLE.read_text()) == RoutingSettings()


def test_the_example_has_every_setting() -> None:
    text = EXAMPLE.read_text()
    for table in ("limits", "prefill", "decode", "breaker"):
        part = text.partition(f"[{table}]")[2].split("\n[")[0]
        names = getattr(RoutingSettings(), table).__dataclass_fields__
        assert all(f"\n{name} = " in part or f"{table}.{name}]" in text for name in names), table


def test_the_guide_names_every_plugin_and_its_examples_are_right() -> None:
    text = GUIDE.read_text()
    plugins = [*(required.name for required in REQUIRED), *FILTERS, *SCORERS, *PICKERS]
    assert [name for name in plugins if f"\n| `{name}` |" not in text] == []
    examples = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert examples
    assert all(parse_routing(example) != RoutingSettings() for example in examples)


def test_what_a_file_leaves_out_is_as_by_default() -> None:
    settings = parse_routing(
        """
        [limits]
        append_tokens = 100
        [decode]
        filters = ["max-waiting"]
        max_waiting = 5
        [[decode.scorers]]
        type = "holder"
        [decode.picker]
        type = "power-of-two"
        [breaker]
        faults = 9
        """
    )
    default = RoutingSettings()
    assert (settings.limits.append_tokens, settings.limits.alone_tokens) == (100, default.limits.alone_tokens)
    assert settings.prefill == default.prefill
    assert settings.decode.scorers == (ScorerSettings(type="holder", weight=1.0),)
    assert (settings.decode.filters, settings.decode.max_waiting) == (("max-waiting",), 5)
    assert settings.decode.picker.type == "power-of-two"
    assert settings.breaker == BreakerSettings(faults=9)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("limits", "this is not TOML"),
        ("[limit]", "limit: there is no such setting; there are limits, prefill, decode, breaker"),
        ("limits = 3", "limits: expected `object`, got `int`"),
        ("[limits]\nalone = 3", "limits.alone: there is no such setting; there are alone_tokens, append_tokens,"),
        ("[limits]\nalone_tokens = -1", "limits.alone_tokens: expected `int` >= 0"),
        ("[limits]\nalone_tokens = 2.5", "limits.alone_tokens: expected `int`, got `float`"),
        ("[limits]\nalone_tokens = true", "limits.alone_tokens: expected `int`, got `bool`"),
        ("[limits]\nappend_tokens = 99999999", "limits.append_tokens: expected `int` <= 10000000"),
        ("[limits]\ndisturbance = nan", "limits.disturbance: expected"),
        ("[limits]\ndisturbance = 1.5", "limits.disturbance: expected `float` <= 1.0"),
        ("[prefill]\nfilters = 'untried'", "prefill.filters: expected `array`, got `str`"),
        (
            "[prefill]\nfilters = ['new']",
            "prefill.filters: there is no 'new'; there are pairs-apart, untried, healthy,",
        ),
        (
            "[prefill]\nfilters = ['ready']",
            "prefill.filters: 'ready' always runs and is not listed; to be listed there",
        ),
        ("[decode]\nfilters = ['untried', 'untried']", "decode.filters: 'untried' is listed twice"),
        ("[decode]\nmax_waiting = 3", "decode.max_waiting: nothing reads it unless decode.filters has 'max-waiting'"),
        ("[[decode.scorers]]\nweight = 3", "decode.scorers[0]: object missing required field `type`"),
        ("[[decode.scorers]]\ntype = 'new'", "decode.scorers: there is no 'new'; there are time, least-running,"),
        (
            "[[decode.scorers]]\ntype = 'time'\nfactor = 3",
            "decode.scorers[0].factor: there is no such setting; there are",
        ),
        ("[[decode.scorers]]\ntype = 'time'\nweight = 0", "decode.scorers[0].weight: expected `float` > 0"),
        ("[[decode.scorers]]\ntype = 'time'\nweight = inf", "decode.scorers[0].weight: expected `float` <= 1000"),
        ("[decode.picker]\ntype = 'worst'", "decode.picker: there is no 'worst'; there are best, power-of-two,"),
        ("[decode.picker]\nseed = 3", "decode.picker.seed: there is no such setting; there are type"),
        ("[breaker]\nfault = 3", "breaker.fault: there is no such setting; there are window_s, faults, share,"),
        ("[breaker]\nshare = 3", "breaker: share must be at most 1, not 3"),
        ("[breaker]\nshare = inf", "breaker: share must be a number above 0, not inf"),
    ],
)
def test_what_is_wrong_is_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}"):
        parse_routing(text)


def test_plugins_are_known_by_their_own_names() -> None:
    figures = live()
    assert [name for name, new in FILTERS.items() if new(figures, 3).name != name] == []
    assert [name for name, new in SCORERS.items() if new(figures).name != name] == []
    assert [name for name, new in PICKERS.items() if new(figures).name != name] == []
    assert FILTERS.keys().isdisjoint(required.name for required in REQUIRED)
    assert not BUSY_FILTERS - FILTERS.keys()


@pytest.mark.parametrize(
    ("leg", "picked"), [(Leg.PREFILL, "p1"), (Leg.READ, "p1"), (Leg.DECODE, "d1"), (Leg.ALONE, "d1")]
)
def test_each_leg_has_a_profile(leg: Leg, picked: str) -> None:
    targets = [target("p1"), target("d1"), target("p2", models=frozenset()), target("d2", models=frozenset())]
    asked = demand(holder=targets[1])
    found = profiles(RoutingSettings(), live())[leg].run(asked, leg, targets)
    assert found is not None
    assert found.node.node_id == picked


def test_filters_that_no_turn_can_do_without_run_first_whatever_is_listed() -> None:
    profile = profiles(parse_routing("[decode]\nfilters = ['max-waiting']"), live())[Leg.DECODE]
    for lame, name in (
        (target("p1"), "role"),
        (target("d1", models=frozenset()), "model"),
        (target("d1", state=NodeState.NOT_READY), "ready"),
        (target("d1", compatibility_hash="x"), "compatible"),
    ):
        explanation = ProfileExplanation()
        assert profile.run(demand(partners=(target("p9"),)), Leg.DECODE, [lame], explanation) is None
        assert explanation.drained_by == name


def test_every_plugin_can_be_used() -> None:
    scorers = "".join(f"[[decode.scorers]]\ntype = '{name}'\n" for name in SCORERS)
    for picker in PICKERS:
        text = f"[decode]\nfilters = {[*FILTERS]}\n{scorers}[decode.picker]\ntype = '{picker}'"
        explanation = ProfileExplanation()
        profile = profiles(parse_routing(text), live())[Leg.DECODE]
        assert profile.run(demand(), Leg.DECODE, [target("d1"), target("d2")], explanation)
        assert [name for name, _ in explanation.ratings[0].scores] == [*SCORERS]


def test_the_limit_of_waiting_requests_is_the_legs_own() -> None:
    figures = live()
    figures.reports.take(target("d1").key, EngineReport(running=1, waiting=4, kv_usage=0.5))
    text = "[decode]\nfilters = ['max-waiting']\nmax_waiting = "
    assert profiles(parse_routing(f"{text}4"), figures)[Leg.DECODE].run(demand(), Leg.DECODE, [target("d1")])
    assert not profiles(parse_routing(f"{text}3"), figures)[Leg.DECODE].run(demand(), Leg.DECODE, [target("d1")])


def test_equal_engines_take_turns_once_legs_are_sent() -> None:
    figures = live()
    profile = profiles(RoutingSettings(), figures)[Leg.DECODE]
    targets = [target("d1"), target("d2")]
    sent: list[Any] = []
    for _ in range(4):
        sent.append(profile.run(demand(), Leg.DECODE, targets))
        figures.picked(sent[-1])
    assert [each.node.node_id for each in sent] == ["d1", "d2", "d1", "d2"]


def test_a_busier_engine_gets_less() -> None:
    figures = live()
    profile = profiles(RoutingSettings(), figures)[Leg.DECODE]
    with figures.load.running(target("d1")):
        picked = [profile.run(demand(), Leg.DECODE, [target("d1"), target("d2")]) for _ in range(2)]
    assert [each.node.node_id for each in picked if each] == ["d2", "d2"]
