import pytest

from backhaul_registry.core.feed import Feed


@pytest.fixture
def feed() -> Feed[str]:
    feed: Feed[str] = Feed(history_length=3)
    feed.reset(10, {"a": "1"})
    return feed


def digest(items: dict[str, str]) -> int:
    """Returns what a client has that knows these items."""
    other: Feed[str] = Feed(history_length=1)
    other.reset(1, items)
    return other.quiet.digest


A, AB = digest({"a": "1"}), digest({"a": "1", "b": "2"})


def test_a_new_client_gets_everything(feed: Feed[str]) -> None:
    feed.apply(11, {"b": "2"}, frozenset())
    opening = feed.open(0, 0)
    assert (opening.revision, opening.snapshot, opening.missed) == (11, {"a": "1", "b": "2"}, ())
    assert opening.digest == AB


def test_a_client_resumes_with_what_it_missed(feed: Feed[str]) -> None:
    feed.apply(11, {"b": "2"}, frozenset())
    feed.apply(12, {}, frozenset({"a"}))
    opening = feed.open(10, A)
    assert (opening.snapshot, opening.revision, opening.digest) == (None, 10, A)
    steps = [(change.revision, change.upserts, change.removals) for change in opening.missed]
    assert steps == [(11, {"b": "2"}, {}), (12, {}, {"a": "1"})]
    assert [change.digest for change in opening.missed] == [AB, digest({"b": "2"})]
    assert feed.open(12, digest({"b": "2"})).missed == ()


def test_a_client_resumes_from_between_two_changes(feed: Feed[str]) -> None:
    feed.apply(20, {"b": "2"}, frozenset())
    assert [change.revision for change in feed.open(15, A).missed] == [20]


@pytest.mark.parametrize("revision", [9, 13, 1 << 60], ids=["before the history", "after it", "far after it"])
def test_a_client_from_outside_the_history_starts_afresh(feed: Feed[str], revision: int) -> None:
    feed.apply(12, {"b": "2"}, frozenset())
    for known in (A, AB):
        assert feed.open(revision, known).snapshot == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    "known",
    [{"a": "2"}, {"a": "1", "b": "2"}, {"b": "1"}, {}],
    ids=["another value", "one too many", "another key", "nothing"],
)
def test_a_client_that_knew_something_else_at_that_revision_starts_afresh(
    feed: Feed[str], known: dict[str, str]
) -> None:
    feed.apply(12, {"b": "2"}, frozenset())
    assert feed.open(11, digest(known)).snapshot == {"a": "1", "b": "2"}
    assert feed.open(11, A).snapshot is None


def test_a_client_that_names_no_digest_starts_afresh_even_where_nothing_is(feed: Feed[str]) -> None:
    feed.apply(12, {}, frozenset({"a"}))
    assert feed.open(12, 0).snapshot == {}
    assert feed.open(12, digest({})).snapshot is None


def test_the_digest_is_that_of_the_content_whatever_came_before(feed: Feed[str]) -> None:
    feed.apply(11, {"b": "0", "c": "3"}, frozenset())
    feed.apply(12, {"b": "2"}, frozenset({"c"}))
    assert feed.quiet.digest == AB


def test_a_full_history_forgets_its_oldest_change(feed: Feed[str]) -> None:
    for revision in range(11, 15):
        feed.apply(revision, {"x": str(revision)}, frozenset())
    assert feed.open(10, A).snapshot is not None
    missed = feed.open(11, digest({"a": "1", "x": "11"})).missed
    assert [change.revision for change in missed] == [12, 13, 14]


def test_a_reset_forgets_the_history(feed: Feed[str]) -> None:
    feed.apply(20, {"b": "2"}, frozenset())
    feed.reset(15, {"c": "3"})
    assert feed.quiet.revision == 15
    for revision, known in ((10, A), (20, AB), (15, A)):
        assert feed.open(revision, known).snapshot == {"c": "3"}
    assert feed.open(15, digest({"c": "3"})).snapshot is None


def test_what_is_no_news_is_no_change_but_moves_the_revision(feed: Feed[str]) -> None:
    assert feed.apply(11, {"a": "1"}, frozenset({"unknown"})) is None
    assert feed.quiet.revision == 11
    assert feed.apply(9, {}, frozenset()) is None
    assert (feed.quiet.revision, feed.quiet.digest) == (11, A)


def test_a_snapshot_does_not_change_under_the_clients_hands(feed: Feed[str]) -> None:
    snapshot = feed.open(0, 0).snapshot
    feed.apply(11, {"b": "2"}, frozenset())
    assert snapshot == {"a": "1"}
