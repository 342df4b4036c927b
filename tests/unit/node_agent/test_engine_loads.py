"""Whose figures a server shows, and for how long they count."""

from backhaul_node_agent.core.engine_loads import MAX_AGE_S, EngineLoad, EngineLoads, Retention
from backhaul_node_agent.core.progress import Figures

BUSY = Figures(waiting=2, running=3, used=0.5)
IDLE = Figures()


def load(engine_id: str, figures: Figures, free: int | None = None, retention: Retention | None = None) -> EngineLoad:
    return EngineLoad(engine_id, round(figures.running), round(figures.waiting), figures.used, free, retention)


def loads_of(
    *engine_ids: str, free: dict[str, int] | None = None, retention: dict[str, Retention] | None = None
) -> EngineLoads:
    """Returns loads of engines that have been known since second 0, by rank."""
    loads = EngineLoads((free or {}).get, (retention or {}).get)
    loads.name(dict(enumerate(engine_ids)), 0)
    return loads


def test_each_rank_has_its_own_figures_and_free_blocks() -> None:
    loads = loads_of("e0", "e1", free={"e1": 7})
    loads.see({0: BUSY, 1: IDLE}, 1)
    assert loads.loads(1) == (load("e0", BUSY), load("e1", IDLE, 7))


def test_what_finished_turns_hold_is_told_of_engines_of_which_it_is_known() -> None:
    held = Retention(set_count=3, block_count=40, block_limit=100)
    loads = loads_of("e0", "e1", retention={"e1": held})
    loads.see({0: BUSY, 1: IDLE}, 1)
    assert loads.loads(1) == (load("e0", BUSY), load("e1", IDLE, retention=held))


def test_an_engine_of_which_nothing_was_shown_is_missing() -> None:
    loads = loads_of("e0", "e1")
    assert loads.loads(0) == ()
    loads.see({1: BUSY}, 1)
    assert loads.loads(1) == (load("e1", BUSY),)


def test_what_was_asked_before_an_engine_had_its_name_is_not_its_own() -> None:
    loads = loads_of("old")
    loads.see({0: BUSY}, 5)
    loads.name({0: "new"}, 6)
    assert loads.loads(6) == ()
    loads.see({0: BUSY}, 5.9)
    assert loads.loads(6) == ()
    loads.see({0: IDLE}, 6)
    assert loads.loads(6) == (load("new", IDLE),)


def test_a_rank_that_is_named_again_as_before_keeps_its_figures() -> None:
    loads = loads_of("e0", "e1")
    loads.see({0: BUSY, 1: IDLE}, 1)
    loads.name({0: "e0", 1: "new"}, 2)
    assert loads.loads(2) == (load("e0", BUSY),)


def test_an_engine_that_is_gone_takes_its_figures_with_it() -> None:
    loads = loads_of("e0", "e1")
    loads.see({0: BUSY, 1: IDLE}, 1)
    loads.name({1: "e1"}, 2)
    assert loads.loads(2) == (load("e1", IDLE),)
    loads.name({0: "e0", 1: "e1"}, 2.1)
    assert loads.loads(2.1) == (load("e1", IDLE),)


def test_figures_of_a_server_that_shows_none_any_more_count_for_a_while() -> None:
    loads = loads_of("e0")
    loads.see({0: BUSY}, 1)
    loads.see({}, 2)
    assert loads.loads(1 + MAX_AGE_S) == (load("e0", BUSY),)
    assert loads.loads(1.1 + MAX_AGE_S) == ()


def test_ranks_that_no_engine_has_are_not_kept() -> None:
    loads = loads_of("e0")
    loads.see(dict.fromkeys(range(10_000), BUSY), 1)
    assert len(loads._shown) == 1
