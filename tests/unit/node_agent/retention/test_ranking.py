"""Which set is worth least, without looking at all of them each time."""

from hypothesis import given
from hypothesis import strategies as st

from backhaul_node_agent.core.retention.ranking import MAX_PER_S, Ranking

_CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "drop", "worth", "look", "pop"]), st.sampled_from("abcdef"), st.integers(0, 4)),
    min_size=20,
    max_size=60,
)


def _ranked(worths: dict[str, int]) -> list[str]:
    # Sorting keeps those of equal worth in the order in which they came.
    return sorted(worths, key=lambda name: worths[name])


@given(_CHANGES)
def test_after_any_changes_it_ranks_as_ranking_all_anew_does(changes: list[tuple[str, str, int]]) -> None:
    """Whatever came to be worth something else is seen within a second."""
    ranking, worths, now = Ranking(), dict[str, int](), 0.0
    for change, name, worth in changes:
        now += 0.25
        match change:
            case "add" if name not in worths:
                ranking.add(name)
                worths[name] = worth
            case "drop":
                ranking.drop(name)
                worths.pop(name, None)
            case "worth" if name in worths:
                worths[name] = worth
            case "look":
                ranking.look(worths.__getitem__, now)
            case "pop":
                now += 1.0
                ranking.look(worths.__getitem__, now)
                expected = next(iter(_ranked(worths)), None)
                assert ranking.pop_least() == expected
                worths.pop(expected or "", None)
            case _:
                pass

    ranking.look(worths.__getitem__, now + 1.0)
    assert [ranking.pop_least() for _ in worths] == _ranked(worths)
    assert ranking.pop_least() is None


def test_what_is_new_is_ranked_at_once_among_what_was_ranked_before() -> None:
    ranking = Ranking()
    worths = {"a": 3.0, "c": 5.0}
    for name in worths:
        ranking.add(name)
    ranking.look(worths.__getitem__, 10.0)

    worths["b"] = 4.0
    ranking.add("b")
    ranking.look(worths.__getitem__, 10.0)

    assert [ranking.pop_least() for _ in worths] == ["a", "b", "c"]


def test_looks_in_between_see_their_share_of_all_sets() -> None:
    ranking, worths = Ranking(), {f"set-{number}": float(number) for number in range(100)}
    for name in worths:
        ranking.add(name)
    ranking.look(worths.__getitem__, 0.0)
    seen: list[str] = []

    def worth_of(name: str) -> float:
        seen.append(name)
        return 0.0

    for step in range(1, 11):
        ranking.look(worth_of, step / 8)

    assert list(dict.fromkeys(seen)) == list(worths)
    assert len(seen) <= 100 * 10 / 8 + 10


def test_however_many_sets_there_are_no_more_are_looked_at_in_a_second() -> None:
    ranking = Ranking()
    looks: list[str] = []
    count = 4 * MAX_PER_S
    for number in range(count):
        ranking.add(f"set-{number}")

    def worth_of(set_id: str) -> float:
        looks.append(set_id)
        return 0.0

    ranking.look(worth_of, 0.0)
    assert len(looks) == count
    looks.clear()

    for step in range(1, 51):
        ranking.look(worth_of, step / 50)

    assert MAX_PER_S <= len(looks) <= MAX_PER_S + 50
    assert len(set(looks)) == len(looks)
