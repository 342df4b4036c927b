"""What the console remembers of the last half hour."""

from backhaul_router.core.console.history import KEPT, Held, History
from backhaul_router.core.console.journal import Journal
from backhaul_router.core.turn import Outcome
from tests.fakes.console import cold, warm

TWO = {
    "d1": Held(sets=1, blocks=10, block_limit=50, tokens=160),
    "d2": Held(sets=2, blocks=5, block_limit=50, tokens=80),
}


def journal() -> Journal:
    return Journal(10, lambda: 1.0)


def play(notes: Journal, *outcomes: Outcome, result: str = "ok") -> None:
    for outcome in outcomes:
        outcome.result = result
        with notes.turn("", "m", "", outcome):
            pass


def test_a_sample_has_what_came_since_the_one_before() -> None:
    notes, history = journal(), History()
    play(notes, cold(ttft_s=1.0), cold(ttft_s=3.0), warm(read=300, local=2000, prompt=2400))
    first = history.take(10, notes.tally, TWO)
    assert (first.routes, first.ttft_s["cold"], first.continued, first.reused) == ({"cold": 2, "warm": 1}, 2.0, 1, 1)
    play(notes, warm(read=100, local=0, prompt=200), result="error_502")
    second = history.take(20, notes.tally, TWO)
    assert second.routes == {"cold": 0, "warm": 1}
    assert (second.read_tokens, second.prompt_tokens, second.failed, second.continued) == (100, 200, 1, 0)
    assert "cold" not in second.ttft_s


def test_what_nodes_hold_is_summed_and_kept_for_each() -> None:
    history = History()
    sample = history.take(10, journal().tally, TWO)
    assert sample.held == Held(sets=3, blocks=15, block_limit=100, tokens=240)
    history.take(20, journal().tally, {"d2": Held(blocks=7)})
    assert {node: list(blocks) for node, blocks in history.nodes.items()} == {"d2": [5, 7]}


def test_half_an_hour_is_kept_and_no_more() -> None:
    history = History()
    for step in range(KEPT + 20):
        history.take(float(step), journal().tally, TWO)
    assert (len(history.samples), history.samples[0].at) == (KEPT, 20.0)
    assert all(len(blocks) == KEPT for blocks in history.nodes.values())
