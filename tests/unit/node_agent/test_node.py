"""What the directory says of a node."""

from dataclasses import replace

import pytest

from backhaul_node_agent import convert
from backhaul_node_agent.core.bounds import MAX_ITEMS, MAX_TEXT_BYTES
from backhaul_node_agent.core.node import (
    NO_CONNECTOR,
    NodeRecord,
    Readiness,
    ServerFacts,
    SideChannelFacts,
    engine_url_problem,
    node_record,
    side_channel_problem,
)
from tests.unit.node_agent.owned import facts

HEALTHY = ServerFacts(healthy=True, models=("model-1",), version="0.32.0", problem="")
SIDE = SideChannelFacts("engine-1", "compatible", 32, 1000)


def record(server: ServerFacts = HEALTHY, *, purging: bool = False, draining: str = "") -> NodeRecord:
    return node_record(
        server=server,
        engines=[facts()],
        side_channels={0: SIDE},
        connected=["engine-1"],
        advertised_host="127.0.0.1",
        purging=purging,
        draining=draining,
    )


@pytest.mark.parametrize(
    ("server", "purging", "draining", "readiness"),
    [
        (HEALTHY, False, "", Readiness.READY),
        (replace(HEALTHY, models=()), False, "", Readiness.NOT_READY),
        (replace(HEALTHY, healthy=False, problem="503"), False, "", Readiness.NOT_READY),
        (HEALTHY, True, "", Readiness.NOT_READY),
        (HEALTHY, True, "draining: 3 requests run", Readiness.DRAINING),
    ],
    ids=["ready", "no-models", "unhealthy", "purging", "draining"],
)
def test_a_node_is_ready_when_nothing_speaks_against_it(
    server: ServerFacts, purging: bool, draining: str, readiness: Readiness
) -> None:
    made = record(server, purging=purging, draining=draining)
    assert made.readiness is readiness
    assert bool(made.reason) == (readiness is not Readiness.READY)


def test_connector_and_side_channel_complete_each_other() -> None:
    (engine,) = record().engines
    assert (engine.compatibility_hash, engine.weights_digest, engine.reuse_problem) == ("compatible", "weights", "")


def test_a_side_channel_that_still_shows_the_engine_before_adds_nothing() -> None:
    made = node_record(
        server=HEALTHY,
        engines=[facts("engine-2")],
        side_channels={0: SIDE},
        connected=["engine-2"],
        advertised_host="127.0.0.1",
        purging=False,
    )
    assert [(engine.engine_id, engine.compatibility_hash) for engine in made.engines] == [("engine-2", "")]


def test_every_engine_is_named_once() -> None:
    made = node_record(
        server=HEALTHY,
        engines=[facts("engine-1", rank=0)],
        side_channels={0: SIDE, 1: SIDE, 2: replace(SIDE, engine_id="engine-3")},
        connected=["engine-1"],
        advertised_host="127.0.0.1",
        purging=False,
    )
    assert [(e.engine_id, e.reuse_problem) for e in made.engines] == [("engine-1", ""), ("engine-3", NO_CONNECTOR)]


@pytest.mark.parametrize(
    ("ranks", "known", "places"),
    [
        pytest.param({0, 1}, [0, 1], [0, 1], id="all ranks"),
        pytest.param({0, 1}, [1], [1], id="rank 0 is not known yet"),
        pytest.param({3}, [3], [0], id="a server per rank"),
        pytest.param({4, 5, 6}, [4, 6], [0, 2], id="a server of some ranks"),
        pytest.param((), [3], [0], id="no figures are shown"),
    ],
)
def test_engines_are_numbered_as_their_server_counts_them(ranks: set[int], known: list[int], places: list[int]) -> None:
    made = node_record(
        server=HEALTHY,
        engines=[facts(f"engine-{rank}", rank=rank) for rank in known],
        side_channels={},
        connected=[],
        advertised_host="127.0.0.1",
        purging=False,
        ranks=ranks,
    )
    told = convert.node(made, node_id="n", session="s", role="decode", agent_address="a:1", engine_url="http://a")
    assert [engine.rank for engine in told.engines] == places
    assert [engine.rank for engine in made.engines] == known


def test_what_engines_must_fit_by_is_told() -> None:
    made = node_record(
        server=HEALTHY,
        engines=[replace(facts(), tp_size=4, kv_head_count=8)],
        side_channels={},
        connected=[],
        advertised_host="127.0.0.1",
        purging=False,
    )
    told = convert.node(made, node_id="n", session="s", role="decode", agent_address="a:1", engine_url="http://a")
    assert [(engine.tp_size, engine.kv_head_count) for engine in told.engines] == [(4, 8)]


def test_a_record_has_so_many_models_and_says_how_many_it_leaves_out() -> None:
    many = tuple(f"model-{number}" for number in range(2 * MAX_ITEMS))
    made = record(replace(HEALTHY, models=("x" * 2000, *many)))
    assert (made.models, made.left_out_count) == (many[:MAX_ITEMS], MAX_ITEMS + 1)
    assert record().left_out_count == 0


def test_a_long_problem_is_cut() -> None:
    made = node_record(
        server=HEALTHY,
        engines=[replace(facts(), problem="ä" * 2000)],
        side_channels={},
        connected=[],
        advertised_host="127.0.0.1",
        purging=False,
    )
    assert len(made.engines[0].reuse_problem.encode()) <= MAX_TEXT_BYTES


@pytest.mark.parametrize(
    ("told", "advertised", "reachable"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("10.0.0.7", "10.0.0.8", True),
        ("decode-1.example", "10.0.0.8", True),
        ("localhost", "10.0.0.8", False),
        ("::1", "fd00::8", False),
        ("0.0.0.0", "decode-1.example", False),
        ("", "10.0.0.8", False),
    ],
)
def test_a_side_channel_that_others_cannot_reach_is_a_problem(told: str, advertised: str, reachable: bool) -> None:
    assert (side_channel_problem(told, advertised) == "") == reachable


@pytest.mark.parametrize(
    ("told", "advertised", "reachable"),
    [
        ("http://127.0.0.1:8200", "127.0.0.1", True),
        ("http://10.0.0.7:8200", "10.0.0.8", True),
        ("https://decode-1.example", "10.0.0.8", True),
        ("http://localhost:8200", "10.0.0.8", False),
        ("http://127.0.0.1:8200", "agent.example", False),
        ("http://[::1]:8200", "fd00::8", False),
        ("http://0.0.0.0:8200", "10.0.0.8", False),
    ],
)
def test_an_engine_that_routers_cannot_reach_is_a_problem(told: str, advertised: str, reachable: bool) -> None:
    problem = engine_url_problem(told, advertised)
    assert (problem == "") == reachable
    assert reachable or "--advertise-engine-url" in problem
