import pytest

from backhaul_registry.core.feed import Change, Feed


@pytest.fixture
def feed() -> Feed[str]:
    feed: Feed[str] = Feed(history_length=3)
    feed.reset(10, {"a": "1"})
    return feed


def test_a_new_client_gets_everything(feed: Feed[str]) -> None:
    feed.apply(11, {"b": "2"}, frozenset())
    opening = feed.open(0)
    assert (opening.revision, opening.snapshot, opening.missed) == (11, {"a": "1", "b": "2"}, ())


def test_a_client_resumes_with_what_it_missed(feed: Feed[str]) -> None:
    feed.apply(11, {"b": "2"}, frozenset())
    feed.apply(12, {}, frozenset({"a"}))
    opening = feed.open(10)
    assert opening.snapshot is None
    assert opening.revision == 10
    assert opening.missed == (Change(11, {"b": "2"}, {}), Change(12, {}, {"a": "1"}))
    assert feed.open(12).missed == ()


@pytest.mark.parametrize("revision", [9, 13, 1 << 60], ids=["before the history", "after it", "far after it"])
def test_a_client_from_outside_the_history_starts_afresh(feed: Feed[str], revision: int) -> None:
    feed.apply(12, {"b": "2"}, frozenset())
    assert feed.open(revision).snapshot == {"a": "1", "b": "2"}


def test_a_full_history_forgets_its_oldest_change(feed: Feed[str]) -> None:
    for revision in range(11, 15):
        feed.apply(revision, {"x": str(revision)}, frozenset())
    assert feed.open(10).snapshot is not None
    missed = feed.open(11).missed
    assert [change.revision for change in missed] == [12, 13, 14]


def test_a_reset_forgets_the_history(feed: Feed[str]) -> None:
    feed.apply(20, {"b": "2"}, frozenset())
    feed.reset(15, {"c": "3"})
    assert feed.revision == 15
    assert feed.open(10).snapshot == {"c": "3"}
    assert feed.open(20).snapshot == {"c": "3"}
    assert feed.open(15).snapshot is None


def test_what_is_no_news_is_no_change_but_moves_the_revision(feed: Feed[str]) -> None:
    assert feed.apply(11, {"a": "1"}, frozenset({"unknown"})) is None
    assert feed.revision == 11
    assert feed.apply(9, {}, frozenset()) is None
    assert feed.revision == 11


def test_a_snapshot_does_not_change_under_the_clients_hands(feed: Feed[str]) -> None:
    snapshot = feed.open(0).snapshot
    feed.apply(11, {"b": "2"}, frozenset())
    assert snapshot == {"a": "1"}
