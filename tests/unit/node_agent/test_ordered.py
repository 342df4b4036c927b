"""Names by their keys: what comes first, and how much is kept of what has gone."""

from hypothesis import given
from hypothesis import strategies as st

from backhaul_node_agent.core.ordered import Ordered

_NAMES = st.sampled_from("abcde")
_KEYS = st.integers(0, 5)
_CHANGES = st.lists(st.tuples(st.sampled_from(["put", "drop", "until", "pop"]), _NAMES, _KEYS), max_size=60)


def _by_key(keys: dict[str, int], end: int) -> list[tuple[int, str]]:
    return sorted((key, name) for name, key in keys.items() if key <= end)


@given(_CHANGES)
def test_after_any_changes_it_says_what_sorting_all_anew_says(changes: list[tuple[str, str, int]]) -> None:
    ordered, keys = Ordered[int](), dict[str, int]()
    for change, name, key in changes:
        match change:
            case "put":
                ordered.put(name, key)
                keys[name] = key
            case "drop":
                ordered.drop(name)
                keys.pop(name, None)
            case "until":
                assert ordered.until(key) == [found for _, found in _by_key(keys, key)]
            case _:
                least = ordered.pop_least()
                assert least == (min(keys, key=lambda one: (keys[one], one)) if keys else None)
                keys.pop(least or "", None)
        assert len(ordered) == len(keys)


def test_a_key_that_a_name_had_before_does_not_bring_it_twice() -> None:
    ordered = Ordered[int]()
    for key in (1, 2, 1):
        ordered.put("a", key)

    assert ordered.until(2) == ["a"]
    assert ordered.pop_least() == "a"
    assert ordered.pop_least() is None


def test_what_changes_for_ever_takes_no_more_room() -> None:
    ordered = Ordered[int]()
    for key in range(10_000):
        ordered.put("a", key)
        ordered.put(f"gone-{key}", key)
        ordered.drop(f"gone-{key}")

    assert len(ordered._heap) < 100
