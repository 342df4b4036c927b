"""Of many engines only some are rated for a turn, and they are the ones that may be best for it."""

from collections.abc import Iterator, Sequence

from backhaul_router.core.routing.demand import Demand, Leg, Prefix
from backhaul_router.core.routing.recency import Recency
from backhaul_router.core.routing.shortlist import ALL, BEST, FAMILIAR, MAX_AGE_S, Shortlist
from backhaul_router.core.routing.target import Target, TargetKey
from tests.unit.router.health.pool import Now
from tests.unit.router.routing.targets import demand, ids, target

MANY = [target(f"d{number}") for number in range(40)]
PROMPT = (Prefix("long", 900), Prefix("short", 100))


class Rater:
    """The first engine is worth the most, unless others are named; counts what it is asked for."""

    def __init__(self) -> None:
        self.rated: list[int] = []
        self.best: Target | None = None

    def __call__(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        assert not demand.prefixes
        assert demand.held is None
        self.rated.append(len(targets))
        return [2.0 if each is self.best else 1.0 - place / 100 for place, each in enumerate(targets)]


class Sent:
    """Who was sent which beginning."""

    def __init__(self, **sent: Sequence[Target]) -> None:
        self._sent = sent

    def familiar(self, prefixes: Sequence[Prefix]) -> Iterator[TargetKey]:
        return (each.key for prefix in prefixes for each in self._sent.get(prefix.key, ()))


class Bench:
    def __init__(self, **sent: Sequence[Target]) -> None:
        self.now, self.recency, self.rater = Now(), Recency(), Rater()
        self.shortlist = Shortlist(self.now, Sent(**sent), self.recency)

    def short(self, targets: Sequence[Target] = MANY, **values: object) -> list[str]:
        return ids(self.shortlist.of(demand(**values), Leg.DECODE, targets, self.rater))


def test_few_engines_are_all_rated() -> None:
    bench = Bench()
    assert bench.short(MANY[:ALL]) == ids(MANY[:ALL])
    assert bench.rater.rated == []


def test_of_many_only_the_best_are_rated_and_all_of_them_only_now_and_then() -> None:
    bench = Bench()
    for _ in range(50):
        assert bench.short() == ids(MANY[:BEST])
    assert bench.rater.rated == [len(MANY)]
    bench.rater.best = MANY[30]
    bench.now.value += MAX_AGE_S + 0.01
    assert bench.short()[0] == "d30"


def test_who_was_given_a_leg_comes_after_those_that_were_not() -> None:
    bench = Bench()
    for picked in MANY[:3]:
        assert picked.node.node_id in bench.short()
        bench.recency.picked(picked)
    assert bench.short() == ids(MANY[3 : 3 + BEST])


def test_where_all_were_given_legs_those_come_first_whose_turn_is_longest_ago() -> None:
    bench, few = Bench(), MANY[: ALL + 1]
    bench.short(few)
    for picked in (*few[4:], *few[:4]):
        bench.recency.picked(picked)
    assert bench.short(few) == ids(few[4 : 4 + BEST])


def test_engines_that_have_some_of_the_prompt_are_rated_too_the_longest_beginnings_first() -> None:
    bench = Bench(long=[MANY[20]], short=MANY[30:])
    assert set(bench.short(prefixes=PROMPT)) == set(ids([*MANY[:BEST], MANY[20], *MANY[30 : 30 + FAMILIAR - 1]]))


def test_the_holder_is_always_rated() -> None:
    assert "d39" in Bench().short(holder=MANY[39])


def test_an_engine_that_is_no_longer_there_is_not_rated_whoever_it_is_known_to() -> None:
    bench = Bench(long=[MANY[0]])
    assert "d0" in bench.short()
    left = MANY[1:]
    assert bench.short(left, prefixes=PROMPT, holder=MANY[0]) == ids(left[:BEST])
    assert bench.rater.rated == [len(MANY), len(left)]
