"""Every parser of bytes from outside has a target, and each of them stands a few hundred inputs that nobody sends."""

import importlib
from collections import Counter

import pytest

from tests.fuzz.play import play
from tests.fuzz.sites import ELSEWHERE, methods, sites
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

_READ = [place for target in TARGETS for place in target.reads]


def test_every_place_that_takes_bytes_apart_has_a_target() -> None:
    assert sites() - ELSEWHERE.keys() - set(_READ) == set()


def test_every_method_has_a_target() -> None:
    assert methods() - set(_READ) == set()


@pytest.mark.parametrize("place", [place for place in _READ if not place.startswith("rpc:")])
def test_what_a_target_says_that_it_reads_exists(place: str) -> None:
    module, _, name = place.partition(":")
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)


def test_targets_differ_in_name_and_place() -> None:
    twice = [name for name, count in Counter([*_READ, *(target.name for target in TARGETS)]).items() if count > 1]
    assert twice == []


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_input_makes_a_parser_fail_otherwise_than_it_says(target: Target) -> None:
    score = play(target, count=300, seed=1)
    assert {kind: crash.given for kind, crash in score.crashes.items()} == {}
    assert score.accepted, "nothing sound is among the inputs"
    assert score.rejected, "nothing unsound is among the inputs"


def test_a_parser_that_fails_is_noticed() -> None:
    def fails_at_a_bracket(data: bytes) -> bool:
        if b"[" in data:
            raise LookupError("a fault")
        return True

    body = next(target for target in TARGETS if target.name == "engine errors")
    faulty = Target("faulty", (), body.inputs, fails_at_a_bracket)
    score = play(faulty, count=300, seed=1)
    (crash,) = score.crashes.values()
    assert b"[" in crash.given
    assert "LookupError: a fault" in crash.trace
