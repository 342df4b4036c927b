"""What engines have in their prefix caches."""

import pytest

from backhaul_router.core.routing import prefixes as module
from backhaul_router.core.routing.demand import Prefix
from backhaul_router.core.routing.prefixes import DEFAULT_CAPACITY, MAX_ENTRIES, MAX_FAMILIAR, MAX_TARGETS, Prefixes
from tests.unit.router.routing.targets import target

P1, P2 = target("p1"), target("p2")
SMALL = target("p3", block_count=100, block_size=10)
"""1,000 tokens."""


def chain(name: str, *counts: int, opening: int = 0) -> list[Prefix]:
    """Returns the beginnings of a prompt, longest first; the shortest may be an opening that all prompts have."""
    own = [Prefix(f"{name}{count}", count) for count in sorted(counts, reverse=True)]
    return own + ([Prefix("opening", opening)] if opening else [])


@pytest.fixture
def prefixes() -> Prefixes:
    return Prefixes()


def test_nothing_is_known_of_a_target_that_was_sent_nothing(prefixes: Prefixes) -> None:
    prefixes.note(P1, chain("a", 500))
    assert prefixes.cached(P2.key, chain("a", 500)) == 0
    assert prefixes.cached(P1.key, chain("b", 500)) == 0
    assert prefixes.cached(P1.key, []) == 0


def test_the_longest_beginning_that_is_there_counts(prefixes: Prefixes) -> None:
    prefixes.note(P1, chain("a", 300, 500))
    assert prefixes.cached(P1.key, chain("a", 300, 500, 900)) == 500
    assert prefixes.cached(P1.key, chain("a", 300)) == 300


def test_a_prompt_without_a_name_is_not_remembered(prefixes: Prefixes) -> None:
    prefixes.note(P1, [Prefix("", 500)])
    assert prefixes.cached(P1.key, [Prefix("", 500)]) == 0


def test_beyond_the_cache_what_was_used_least_recently_goes(prefixes: Prefixes) -> None:
    for name in "abcd":
        prefixes.note(SMALL, chain(name, 250))
    prefixes.note(SMALL, chain("a", 250))
    prefixes.note(SMALL, chain("e", 250))
    cached = {name: prefixes.cached(SMALL.key, chain(name, 250)) for name in "abcde"}
    assert cached == {"a": 250, "b": 0, "c": 250, "d": 250, "e": 250}


def test_of_one_prompt_the_end_goes_first(prefixes: Prefixes) -> None:
    prefixes.note(SMALL, chain("a", 200, 400, 600))
    prefixes.note(SMALL, chain("b", 500))
    assert prefixes.cached(SMALL.key, chain("a", 200, 400, 600)) == 400


def test_beginnings_that_prompts_share_take_their_room_once(prefixes: Prefixes) -> None:
    for name in "abcd":
        prefixes.note(SMALL, chain(name, 800, 850, opening=750))
    assert [prefixes.cached(SMALL.key, chain(name, 850, opening=750)) for name in "abcd"] == [750, 750, 850, 850]


def test_a_prompt_larger_than_the_cache_leaves_its_beginning(prefixes: Prefixes) -> None:
    prefixes.note(SMALL, chain("a", 400, 2000))
    assert prefixes.cached(SMALL.key, chain("a", 400, 2000)) == 400


def test_a_new_estimate_of_a_length_replaces_the_old_one(prefixes: Prefixes) -> None:
    for count in range(100, 900):
        prefixes.note(SMALL, [Prefix("a", count)])
    prefixes.note(SMALL, chain("b", 100))
    assert prefixes.cached(SMALL.key, [Prefix("a", 800)]) == 800
    prefixes.note(SMALL, chain("c", 100))
    assert prefixes.cached(SMALL.key, [Prefix("a", 800)]) == 0


def test_a_cache_of_unknown_size_has_a_default(prefixes: Prefixes) -> None:
    unknown = target("p4", engines=())
    for number in range(3):
        prefixes.note(unknown, chain(f"a{number}-", DEFAULT_CAPACITY // 2))
    cached = [prefixes.cached(unknown.key, chain(f"a{number}-", DEFAULT_CAPACITY // 2)) for number in range(3)]
    assert cached == [0, DEFAULT_CAPACITY // 2, DEFAULT_CAPACITY // 2]


def test_so_many_beginnings_are_remembered(prefixes: Prefixes) -> None:
    for number in range(MAX_ENTRIES + 1):
        prefixes.note(P1, [Prefix(str(number), 1)])
    assert [prefixes.cached(P1.key, [Prefix(key, 1)]) for key in ("0", "1")] == [0, 1]


def test_so_many_targets_are_remembered(prefixes: Prefixes) -> None:
    targets = [target(f"p{number}") for number in range(MAX_TARGETS + 1)]
    for each in targets:
        prefixes.note(each, chain("a", 10))
    assert [prefixes.cached(each.key, chain("a", 10)) for each in (*targets[:2], targets[-1])] == [0, 10, 10]


# Corrections


def test_what_the_engine_had_not_is_dropped(prefixes: Prefixes) -> None:
    prefixes.note(P1, chain("a", 300, 600, 900))
    prefixes.correct(P1, chain("a", 300, 600, 900, 1200), local=304)
    assert prefixes.cached(P1.key, chain("a", 300, 600, 900)) == 600
    prefixes.correct(P1, chain("a", 300, 600, 900), local=0)
    assert prefixes.cached(P1.key, chain("a", 300, 600, 900)) == 0


def test_what_was_used_before_it_is_dropped_too(prefixes: Prefixes) -> None:
    for name in "abc":
        prefixes.note(P1, chain(name, 500))
    prefixes.correct(P1, chain("b", 500), local=0)
    assert [prefixes.cached(P1.key, chain(name, 500)) for name in "abc"] == [0, 0, 500]


def test_an_engine_that_had_what_was_expected_or_more_changes_nothing(prefixes: Prefixes) -> None:
    prefixes.note(P1, chain("a", 300, 600))
    for local in (450, 600, 10_000):
        prefixes.correct(P1, chain("a", 300, 600, 800), local=local)
    assert prefixes.cached(P1.key, chain("a", 300, 600)) == 600


def test_a_correction_of_what_is_not_known_changes_nothing(prefixes: Prefixes) -> None:
    prefixes.correct(P1, chain("a", 300), local=0)
    prefixes.note(P1, chain("b", 300))
    prefixes.correct(P1, chain("a", 300), local=0)
    assert prefixes.cached(P1.key, chain("b", 300)) == 300


def test_nodes_that_have_left_are_forgotten(prefixes: Prefixes) -> None:
    prefixes.note(P1, chain("a", 300))
    prefixes.note(P2, chain("a", 300))
    prefixes.forget({"p2"})
    assert (prefixes.cached(P1.key, chain("a", 300)), prefixes.cached(P2.key, chain("a", 300))) == (0, 300)


def test_who_was_sent_a_prompt_last_is_familiar_with_it_the_longest_beginning_first(prefixes: Prefixes) -> None:
    for sent_to in (P1, P2):
        prefixes.note(sent_to, chain("a", 500, opening=100))
    prefixes.note(SMALL, chain("b", 700, opening=100))
    found = [*prefixes.familiar(chain("a", 500, 900, opening=100))]
    assert found == [P2.key, P1.key, SMALL.key, P2.key, P1.key]
    assert [*prefixes.familiar(chain("c", 500))] == []


def test_only_the_last_ones_to_have_a_prompt_are_remembered_each_once(prefixes: Prefixes) -> None:
    many = [target(f"p{number}") for number in range(MAX_FAMILIAR + 2)]
    for sent_to in (*many, many[-2]):
        prefixes.note(sent_to, chain("a", 500))
    latest = [many[-2], many[-1], *reversed(many[2:-2])]
    assert [*prefixes.familiar(chain("a", 500))] == [each.key for each in latest]


def test_the_prompts_that_were_sent_longest_ago_are_forgotten(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PROMPTS", 2)
    for name in ("a", "b", "a", "c"):
        prefixes.note(P1, chain(name, 500))
    assert [name for name in "abc" if [*prefixes.familiar(chain(name, 500))]] == ["a", "c"]
