"""Filters, scorers and a picker choose the engine for a leg."""

import math
from collections.abc import Sequence

import pytest

from backhaul_router.core.routing.demand import Demand, Leg
from backhaul_router.core.routing.explanation import ProfileExplanation, Rating, Removal
from backhaul_router.core.routing.pickers.best import BestPicker
from backhaul_router.core.routing.plugin import Filter, Picker, Scored, Scorer
from backhaul_router.core.routing.prefixes import Prefixes
from backhaul_router.core.routing.profile import Profile
from backhaul_router.core.routing.recency import Recency
from backhaul_router.core.routing.shortlist import ALL, BEST, NAME, Shortlist
from backhaul_router.core.routing.target import Target
from tests.unit.router.routing.targets import demand, ids, target

D1, D2, D3 = (target(node_id) for node_id in ("d1", "d2", "d3"))


class Without:
    """Removes nodes by id."""

    def __init__(self, *node_ids: str, name: str = "without") -> None:
        self.name = name
        self.asked: list[list[str]] = []
        self._node_ids = node_ids

    def keep(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[Target]:
        self.asked.append(ids(targets))
        return [target for target in targets if target.node.node_id not in self._node_ids]


class Worth:
    """Rates nodes by id; others are worth nothing."""

    def __init__(self, name: str = "worth", **scores: float) -> None:
        self.name = name
        self._scores = scores

    def score(self, demand: Demand, leg: Leg, targets: Sequence[Target]) -> Sequence[float]:
        return [self._scores.get(target.node.node_id, 0.0) for target in targets]


class Watching(BestPicker):
    """Picks the best, and shows what it was given."""

    def __init__(self) -> None:
        super().__init__(Recency())
        self.scored: Sequence[Scored] = ()

    def pick(self, demand: Demand, leg: Leg, scored: Sequence[Scored]) -> Target:
        self.scored = scored
        return super().pick(demand, leg, scored)


_: tuple[type[Filter], type[Scorer], type[Picker]] = (Without, Worth, Watching)


def run(profile: Profile, *targets: Target) -> str | None:
    picked = profile.run(demand(), Leg.DECODE, targets)
    return picked.node.node_id if picked else None


def test_the_best_of_what_filters_leave_is_picked() -> None:
    profile = Profile([Without("d3")], [(Worth(d1=0.2, d2=0.6, d3=0.9), 1.0)], BestPicker(Recency()))
    assert run(profile, D1, D2, D3) == "d2"


def test_each_filter_gets_what_the_ones_before_left() -> None:
    first, second, third = Without("d1"), Without("d2"), Without()
    profile = Profile([first, second, third], [], BestPicker(Recency()))
    assert run(profile, D1, D2, D3) == "d3"
    assert [each.asked for each in (first, second, third)] == [[["d1", "d2", "d3"]], [["d2", "d3"]], [["d3"]]]


def test_scores_are_bounded_and_count_by_their_weights() -> None:
    picker = Watching()
    profile = Profile([], [(Worth(d1=7.0, d2=-7.0, d3=math.nan), 3.0), (Worth(d1=0.0, d2=1.0, d3=0.5), 1.0)], picker)
    run(profile, D1, D2, D3)
    assert [each.score for each in picker.scored] == [0.75, 0.25, 0.125]


def test_without_scorers_all_are_equal() -> None:
    picker = Watching()
    assert run(Profile([], [], picker), D1, D2) == "d1"
    assert [each.score for each in picker.scored] == [1.0, 1.0]


def test_where_nothing_is_left_nothing_is_picked_and_nobody_else_is_asked() -> None:
    later = Without()
    profile = Profile([Without("d1"), later], [(Worth(), 1.0)], BestPicker(Recency()))
    assert run(profile, D1) is None
    assert run(profile) is None
    assert later.asked == []


def test_a_choice_is_explained() -> None:
    scorers = [(Worth("one", d2=0.5, d3=1.0), 1.0), (Worth("two", d2=2.0), 3.0)]
    profile = Profile([Without("d1", name="gone"), Without()], scorers, BestPicker(Recency()))
    explanation = ProfileExplanation()
    assert profile.run(demand(), Leg.DECODE, [D1, D2, D3], explanation) is D2
    assert explanation == ProfileExplanation(
        leg=Leg.DECODE,
        considered=(D1, D2, D3),
        removals=[Removal("gone", (D1,))],
        ratings=(
            Rating(D2, (("one", 0.5), ("two", 1.0)), 0.875),
            Rating(D3, (("one", 1.0), ("two", 0.0)), 0.25),
        ),
        picked=D2,
    )


def test_of_several_runs_the_last_is_explained() -> None:
    profile = Profile([Without("d1")], [], BestPicker(Recency()))
    explanation = ProfileExplanation()
    profile.run(demand(), Leg.DECODE, [D1], explanation)
    profile.run(demand(), Leg.ALONE, [D2], explanation)
    assert explanation == ProfileExplanation(leg=Leg.ALONE, considered=(D2,), ratings=(Rating(D2, (), 1.0),), picked=D2)


@pytest.mark.parametrize(
    ("targets", "drained_by", "busy"),
    [([D1, D2], "max-waiting", True), ([D1], "role", False), ([], "", False), ([D2, D3], "", False)],
)
def test_busy_engines_are_told_from_none(targets: list[Target], drained_by: str, busy: bool) -> None:
    profile = Profile([Without("d1", name="role"), Without("d2", name="max-waiting")], [], BestPicker(Recency()))
    explanation = ProfileExplanation()
    profile.run(demand(), Leg.DECODE, targets, explanation)
    assert (explanation.drained_by, explanation.busy) == (drained_by, busy)


def test_of_many_engines_those_on_the_shortlist_are_rated_and_the_others_are_explained() -> None:
    many = [target(f"d{number}") for number in range(1, ALL + 2)]
    worth = Worth("worth", **{each.node.node_id: 0.9 - place / 100 for place, each in enumerate(many)})
    shortlist = Shortlist(lambda: 0.0, Prefixes(), Recency())
    profile, explanation = Profile([], [(worth, 1.0)], Watching(), shortlist=shortlist), ProfileExplanation()
    assert profile.run(demand(), Leg.DECODE, many, explanation) is many[0]
    assert [rating.target for rating in explanation.ratings] == many[:BEST]
    assert explanation.removals == [Removal(NAME, tuple(many[BEST:]))]


def test_required_filters_run_first_and_not_again_for_engines_that_are_able() -> None:
    required, chosen = Without("d1"), Without("d2")
    profile = Profile([chosen], [], BestPicker(Recency()), required=[required])
    assert run(profile, D1, D2, D3) == "d3"
    assert profile.pick(demand(), Leg.DECODE, [D1, D2]) is D1
    assert (required.asked, chosen.asked) == ([["d1", "d2", "d3"]], [["d2", "d3"], ["d1", "d2"]])
    assert not profile.admits(demand(), Leg.DECODE, D1)
