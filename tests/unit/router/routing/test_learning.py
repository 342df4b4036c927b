"""What legs teach."""

from dataclasses import replace
from typing import Any

import pytest

from backhaul_connector.wire import Verdict
from backhaul_router.core.routing.costs import Costs
from backhaul_router.core.routing.demand import Demand, Held, Prefix
from backhaul_router.core.routing.learning import Learning
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.target import TargetKey
from backhaul_router.core.routing.tokens import TokenRates
from tests.unit.router.routing.targets import target

P1, D1 = target("p1"), target("d1")
DEMAND = Demand("m", 1_000, (Prefix("all", 1_000), Prefix("part", 400)))
HELD = replace(DEMAND, held=Held(D1, 900))


class Noted(Costs):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def note_prefill(self, key: TargetKey, *, computed: int, read: int, seconds: float) -> None:
        self.notes.append(("prefill", key[0], computed, read, seconds))

    def note_decode(self, key: TargetKey, *, moved: int, seconds: float) -> None:
        self.notes.append(("decode", key[0], moved, seconds))

    def note_alone(self, key: TargetKey, *, computed: int, seconds: float) -> None:
        self.notes.append(("alone", key[0], computed, seconds))

    def alone_s(self, key: TargetKey, *, computed: int) -> float:
        return 0.02 + 0.001 * computed


class Lessons:
    """What is learnt, and all of what it is learnt into."""

    def __init__(self) -> None:
        self.costs, self.prefixes, self.rates = Noted(), Prefixes(), TokenRates()
        self.learning = Learning(costs=self.costs, prefixes=self.prefixes, rates=self.rates)

    def prefilled(self, demand: Demand = DEMAND, *, verdict: Verdict | None = None, **counts: int) -> None:
        counts = {"byte_count": 4_000, "token_count": 1_000, **counts}
        self.learning.prefilled(P1, demand, verdict=verdict, seconds=2.0, **counts)

    @property
    def note(self) -> tuple[Any, ...]:
        [note] = self.costs.notes
        return note


@pytest.fixture
def lessons() -> Lessons:
    return Lessons()


def verdict(**counts: Any) -> Verdict:
    fields: dict[str, Any] = {"prompt": 1_000, "local": 0, "read": 0, "spent": True, "refused": "", **counts}
    return Verdict(**fields)


def test_what_the_connector_says_was_computed_and_read_is_what_it_cost(lessons: Lessons) -> None:
    lessons.prefilled(verdict=verdict(local=100, read=600))
    assert lessons.note == ("prefill", "p1", 300, 600, 2.0)


def test_without_the_connector_what_is_probably_cached_was_not_computed(lessons: Lessons) -> None:
    lessons.prefixes.note(P1, DEMAND.prefixes[1:])
    lessons.prefilled()
    assert lessons.note == ("prefill", "p1", 600, 0, 2.0)


def test_one_token_is_computed_at_the_least(lessons: Lessons) -> None:
    lessons.prefilled(verdict=verdict(local=1_000))
    assert lessons.note == ("prefill", "p1", 1, 0, 2.0)


def test_what_the_engine_counted_counts_and_not_what_was_estimated(lessons: Lessons) -> None:
    lessons.prefilled(token_count=2_000)
    assert lessons.note == ("prefill", "p1", 2_000, 0, 2.0)
    assert lessons.prefixes.cached(P1.key, DEMAND.prefixes) == 1_000


def test_where_nothing_was_counted_the_estimate_does(lessons: Lessons) -> None:
    lessons.prefilled(token_count=0)
    assert lessons.note == ("prefill", "p1", 1_000, 0, 2.0)


def test_the_rate_of_tokens_follows_what_engines_count_of_text(lessons: Lessons) -> None:
    before = lessons.rates.estimate("m", 4_000)
    lessons.prefilled(byte_count=0)
    assert lessons.rates.estimate("m", 4_000) == before
    lessons.prefilled(token_count=2_000)
    assert lessons.rates.estimate("m", 4_000) > before
    assert lessons.rates.estimate("another", 4_000) == before


def test_what_was_computed_is_cached_from_then_on(lessons: Lessons) -> None:
    lessons.prefilled()
    assert lessons.prefixes.cached(P1.key, DEMAND.prefixes) == 1_000
    assert lessons.prefixes.cached(D1.key, DEMAND.prefixes) == 0


def test_an_engine_that_had_less_than_thought_has_lost_it_but_has_it_now(lessons: Lessons) -> None:
    other = (Prefix("other", 500),)
    lessons.prefixes.note(P1, other)
    lessons.prefixes.note(P1, DEMAND.prefixes)
    lessons.prefilled(verdict=verdict(local=0))
    assert lessons.prefixes.cached(P1.key, DEMAND.prefixes) == 1_000
    assert lessons.prefixes.cached(P1.key, other) == 0


@pytest.mark.parametrize(("demand", "moved"), [(DEMAND, 1_000), (HELD, 100)])
def test_a_hand_off_moves_what_the_decode_engine_lacks(lessons: Lessons, demand: Demand, moved: int) -> None:
    lessons.learning.decoded(D1, demand, seconds=0.5)
    assert lessons.note == ("decode", "d1", moved, 0.5)
    assert lessons.prefixes.cached(D1.key, DEMAND.prefixes) == 1_000


@pytest.mark.parametrize(("demand", "computed"), [(DEMAND, 1_000), (HELD, 100)])
def test_an_engine_alone_computes_what_it_lacks(lessons: Lessons, demand: Demand, computed: int) -> None:
    lessons.learning.appended(D1, demand, seconds=0.5)
    assert lessons.note == ("alone", "d1", computed, 0.5)
    assert lessons.prefixes.cached(D1.key, DEMAND.prefixes) == 1_000


OPENED = Demand("m", 1_000, (Prefix("all", 1_000), Prefix("opening", 980)))
"""Takes 40 ms where the opening is cached, 1,020 ms where it is not. What lies between is nearer to one of the two."""


@pytest.mark.parametrize(("seconds", "computed"), [(0.04, 20), (0.2, 20), (0.21, 1_000), (1.0, 1_000)])
def test_an_engine_that_takes_as_long_as_for_all_of_a_prompt_had_lost_its_beginning(
    lessons: Lessons, seconds: float, computed: int
) -> None:
    other = (Prefix("other", 500),)
    lessons.prefixes.note(D1, other)
    lessons.prefixes.note(D1, OPENED.prefixes[1:])
    lessons.learning.appended(D1, OPENED, seconds=seconds)
    assert lessons.note == ("alone", "d1", computed, seconds)
    assert lessons.prefixes.cached(D1.key, OPENED.prefixes) == 1_000
    assert lessons.prefixes.cached(D1.key, other) == (500 if computed == 20 else 0)


def test_what_is_held_is_never_lost(lessons: Lessons) -> None:
    lessons.learning.appended(D1, HELD, seconds=5.0)
    assert lessons.note == ("alone", "d1", 100, 5.0)


def test_times_that_are_alike_tell_nothing(lessons: Lessons) -> None:
    lessons.prefixes.note(D1, DEMAND.prefixes[1:])
    lessons.learning.appended(D1, DEMAND, seconds=5.0)
    assert lessons.note == ("alone", "d1", 600, 5.0)


def test_what_another_engine_holds_is_moved_all_the_same(lessons: Lessons) -> None:
    lessons.learning.decoded(target("d2"), HELD, seconds=0.5)
    assert lessons.note == ("decode", "d2", 1_000, 0.5)
