"""A step digests no more than its share, and everything is digested in the end."""

from hypothesis import given
from hypothesis import strategies as st

from backhaul_connector.digesting import Digester

PER_STEP, AHEAD = 100, 10


class Tokens:
    """So many tokens to digest, of which each call's count is noted."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.taken: list[int] = []

    @property
    def done(self) -> bool:
        return not self.left

    def advance(self, limit: int) -> int:
        assert limit > 0
        self.taken.append(min(limit, self.left))
        self.left -= self.taken[-1]
        return self.taken[-1]


def digester() -> Digester:
    return Digester(PER_STEP, AHEAD)


def test_what_a_step_has_room_for_is_finished_at_once() -> None:
    done: list[str] = []
    made = digester()

    made.finish("a", Tokens(40), lambda: done.append("a"))
    made.finish("b", Tokens(60), lambda: done.append("b"))
    made.finish("c", Tokens(1), lambda: done.append("c"))

    assert done == ["a", "b"]
    assert made.finished("a")
    assert not made.finished("c")


def test_what_is_left_is_finished_in_the_next_steps_first_come_first_served() -> None:
    done: list[str] = []
    made = digester()
    made.finish("long", Tokens(250), lambda: done.append("long"))
    made.finish("short", Tokens(10), lambda: done.append("short"))

    seen = []
    for _ in range(3):
        made.stepped()
        seen.append([made.finished(name) for name in ("long", "short")])

    assert seen == [[False, False], [True, True], [True, True]]
    assert done == ["long", "short"]


def test_asking_whether_it_is_finished_goes_on_as_far_as_the_step_may() -> None:
    made = digester()
    made.finish("a", Tokens(250), lambda: None)
    made.stepped()

    assert not made.finished("a")
    assert not made.finished("a")
    made.stepped()
    assert made.finished("a")


def test_what_is_followed_gets_a_little_of_each_step() -> None:
    made, work = digester(), Tokens(25)
    made.follow("a", work)
    for _ in range(4):
        made.stepped()

    assert work.taken == [10, 10, 5, 0]


def test_a_step_looks_at_few_of_those_that_are_followed_and_the_next_at_others() -> None:
    made, works = digester(), [Tokens(0) for _ in range(20)]
    for number, work in enumerate(works):
        made.follow(str(number), work)

    made.stepped()
    assert [len(work.taken) for work in works] == [1] * 8 + [0] * 12
    for _ in range(4):
        made.stepped()
    assert [len(work.taken) for work in works] == [2] * 20


def test_one_that_has_much_left_keeps_its_turn() -> None:
    made, long, short = digester(), Tokens(15), Tokens(5)
    made.follow("long", long)
    made.follow("short", short)
    for _ in range(2):
        made.stepped()

    assert (long.left, short.left) == (0, 0)


def test_what_is_dropped_is_neither_digested_nor_done() -> None:
    done: list[str] = []
    made, followed, finishing = digester(), Tokens(50), Tokens(150)
    made.follow("followed", followed)
    made.finish("finishing", finishing, lambda: done.append("finishing"))
    for name in ("followed", "finishing", "unknown"):
        made.drop(name)
    made.stepped()

    assert (followed.left, finishing.left, done) == (50, 50, [])


def test_what_was_followed_is_followed_no_more_once_it_is_to_be_finished() -> None:
    made, work = digester(), Tokens(150)
    made.follow("a", work)
    made.finish("a", work, lambda: None)
    for _ in range(3):
        made.stepped()

    assert work.taken == [100, 50]


names = st.sampled_from("abcdef")
operations = st.one_of(
    st.tuples(st.just("follow"), names, st.integers(0, 300)),
    st.tuples(st.just("finish"), names, st.integers(0, 300)),
    st.tuples(st.just("step"), names, st.just(0)),
    st.tuples(st.just("ask"), names, st.just(0)),
    st.tuples(st.just("drop"), names, st.just(0)),
)


@given(steps=st.lists(operations, max_size=40))
def test_no_step_digests_more_than_its_share_whatever_comes(steps: list[tuple[str, str, int]]) -> None:
    made, all_work, before, asked = digester(), [], 0, []
    for name, key, count in steps:
        match name:
            case "follow" | "finish":
                made.drop(key)
                all_work.append(work := Tokens(count))
                if name == "follow":
                    made.follow(key, work)
                else:
                    made.finish(key, work, lambda: None)
                    asked.append((key, work))
            case "step":
                made.stepped()
                digested = sum(sum(work.taken) for work in all_work)
                assert digested - before <= PER_STEP
                before = digested
            case "ask":
                made.finished(key)
            case "drop":
                made.drop(key)
                asked = [(other, work) for other, work in asked if other != key]
    for _ in range(40 * 300 // PER_STEP):
        made.stepped()
    assert all(made.finished(key) for key, _ in asked)
