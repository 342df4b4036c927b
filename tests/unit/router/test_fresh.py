"""Keys of turns that have only just ended."""

from backhaul_router.core.fresh import FRESH_S, MAX_FRESH, FreshKeys
from tests.unit.router.health.pool import Now


def test_a_fresh_key_that_is_not_found_is_missing() -> None:
    fresh = FreshKeys(Now())
    fresh.note("s", "b")
    assert fresh.missing("s", ["a", "b"], set()) == "b"
    assert fresh.missing("s", ["b", "a"], {"a"}) == "b"
    assert fresh.missing("s", ["a", "b"], {"b"}) == ""
    assert fresh.missing("other", ["a", "b"], set()) == ""


def test_a_key_is_not_missing_where_a_better_one_is_found() -> None:
    fresh = FreshKeys(Now())
    fresh.note("s", "b")
    assert fresh.missing("s", ["a", "b"], {"a"}) == ""


def test_a_key_is_fresh_for_a_moment_only() -> None:
    now = Now()
    fresh = FreshKeys(now)
    fresh.note("s", "a")
    now.value = FRESH_S
    assert fresh.missing("s", ["a"], set()) == ""


def test_a_forgotten_key_is_not_missing() -> None:
    fresh = FreshKeys(Now())
    fresh.note("s", "a")
    fresh.forget("s", "a")
    fresh.forget("s", "never noted")
    assert fresh.missing("s", ["a"], set()) == ""


def test_the_oldest_keys_make_room() -> None:
    fresh = FreshKeys(Now())
    for index in range(MAX_FRESH + 1):
        fresh.note("s", str(index))
    assert fresh.missing("s", ["0"], set()) == ""
    assert fresh.missing("s", ["1"], set()) == "1"
