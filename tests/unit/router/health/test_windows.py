"""What was counted of late."""

from backhaul_router.core.health.windows import SlidingCount


def test_what_is_older_than_the_window_counts_no_more() -> None:
    count = SlidingCount(10.0)
    for now in (0.0, 0.1, 5.0):
        count.add(now)
    assert [count.total(now) for now in (5.0, 9.9, 10.6, 14.9, 15.6)] == [3, 3, 1, 1, 0]


def test_a_window_is_no_larger_for_much_that_is_counted() -> None:
    count = SlidingCount(10.0)
    for step in range(10_000):
        count.add(step * 0.01)
    assert len(count._slots) <= 21
    assert 1_000 <= count.total(99.99) <= 1_050


def test_a_cleared_window_begins_anew() -> None:
    count = SlidingCount(10.0)
    count.add(1.0)
    count.clear()
    assert count.total(1.0) == 0
    count.add(1.0)
    assert count.total(1.0) == 1
