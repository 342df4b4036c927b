"""A decode engine's connector says how many blocks are free, and how many are waited for."""

from dataclasses import dataclass

from backhaul_connector.memory import MemoryWatcher
from backhaul_connector.wire import Memory


@dataclass
class Pool:
    free: int = 100

    def get_num_free_blocks(self) -> int:
        return self.free


def watcher(*, groups: int = 1) -> MemoryWatcher:
    made = MemoryWatcher(16, groups)
    made.bind(Pool())
    return made


def test_a_request_that_was_tried_and_got_no_blocks_waits_and_so_do_those_behind_it() -> None:
    made = watcher()
    made.arrived("first", 160)
    made.arrived("second", 17)
    made.asked("first", 160)

    assert made.stepped(0.0) == Memory(free_count=100, waiting_count=12)


def test_a_prompt_that_does_not_fit_into_what_is_left_of_a_step_waits_for_the_next_one_and_for_no_blocks() -> None:
    made = MemoryWatcher(16, 1, 100)
    made.bind(Pool())
    made.asked("request", 160, computed_now=61)
    assert made.stepped(0.0, planned=40) == Memory(free_count=100, waiting_count=0)
    assert not made.waits
    made.asked("request", 160, computed_now=60)
    assert made.stepped(1.0, planned=40) == Memory(free_count=100, waiting_count=10)


def test_where_prompts_are_cut_no_step_is_too_full() -> None:
    made = watcher()
    made.asked("request", 160, computed_now=160)
    assert made.stepped(0.0, planned=10_000) == Memory(free_count=100, waiting_count=10)


def test_a_request_that_was_passed_over_for_another_one_waits_for_something_else() -> None:
    made = watcher()
    made.asked("passed-over", 160)
    made.asked("next", 160)
    made.left("next")
    assert made.stepped(0.0) == Memory(free_count=100, waiting_count=0)


def test_requests_that_wait_for_something_else_wait_for_no_blocks() -> None:
    made = watcher()
    made.arrived("first", 160)

    assert made.stepped(0.0) == Memory(free_count=100, waiting_count=0)


def test_a_request_that_got_its_blocks_or_left_waits_no_more() -> None:
    made = watcher()
    for name in ("allocated", "aborted", "first"):
        made.asked(name, 16)
        made.arrived(name, 16)
    made.left("allocated")
    made.left("aborted")

    assert made.stepped(0.0) == Memory(free_count=100, waiting_count=1)
    made.left("first")
    assert made.stepped(1.0) == Memory(free_count=100, waiting_count=0)


def test_a_request_that_was_preempted_waits_again_with_all_its_tokens() -> None:
    made = watcher()
    made.asked("request", 16)
    made.left("request")
    made.asked("request", 64)

    assert made.stepped(0.0) == Memory(free_count=100, waiting_count=4)


def test_every_cache_group_takes_blocks_of_its_own() -> None:
    made = watcher(groups=3)
    made.asked("request", 32)

    assert made.stepped(0.0) == Memory(free_count=100, waiting_count=6)


def test_figures_are_due_every_20_ms_or_at_once_when_a_request_begins_to_wait() -> None:
    made = watcher()
    assert made.stepped(0.0) is not None
    assert made.stepped(0.01) is None
    made.asked("request", 16)
    assert made.stepped(0.012) == Memory(free_count=100, waiting_count=1)
    made.asked("request", 16)
    assert made.stepped(0.02) is None
    assert made.stepped(0.033) == Memory(free_count=100, waiting_count=0)


def test_without_a_pool_there_is_nothing_to_say() -> None:
    assert MemoryWatcher(16, 1).stepped(0.0) is None


def test_whether_somebody_waits_is_known_at_once_whenever_figures_are_due() -> None:
    made = watcher()
    made.stepped(0.0)
    made.asked("first", 160)
    made.stepped(0.001)
    assert made.waits
    made.left("first")
    made.stepped(0.002)
    assert not made.waits
