"""The turns that a router remembers, and which of them are one conversation's."""

import asyncio
from itertools import count

import pytest

from backhaul_router.core.body import Endpoint, parse_body
from backhaul_router.core.console.journal import MAX_REASONS, Entry, Journal
from backhaul_router.core.errors import ApiError
from backhaul_router.core.lookup import TurnKeys, keys_of, session_key
from backhaul_router.core.turn import Outcome
from tests.fakes.console import appended, cold, warm
from tests.unit.router.bodies import chat


def journal(keep: int = 100) -> Journal:
    """Returns a journal whose clock goes on by a second with each look."""
    seconds = count(1000)
    return Journal(keep, lambda: float(next(seconds)))


def keys(*contents: str, session: bytes | None = None) -> TurnKeys:
    """Returns the keys of a chat turn."""
    return keys_of(chat(*contents, model="m"), session)


def play(
    notes: Journal,
    keys: TurnKeys | None = None,
    outcome: Outcome | None = None,
    *,
    result: str = "ok",
    scope: str = "s",
) -> Entry:
    """Plays one turn."""
    outcome = outcome or cold()
    outcome.result = result
    with notes.turn("/v1/chat/completions", "m", "", outcome) as entry:
        entry.keyed(scope, keys or TurnKeys((), (), continues=False))
    return entry


def numbers(entries: list[Entry]) -> list[int]:
    return [entry.number for entry in entries]


def test_the_oldest_turns_are_forgotten_and_the_sums_stay() -> None:
    notes = journal(keep=3)
    for _ in range(5):
        play(notes)
    assert numbers(notes.since(0, most=10)) == [3, 4, 5]
    assert notes.find(1) is None
    assert notes.tally.routes == {"cold": 5}


def test_a_journal_without_room_takes_no_notes() -> None:
    notes = journal(keep=0)
    play(notes)
    assert (notes.ended_count, notes.tally.routes, notes.find(1)) == (0, {}, None)


def test_an_onlooker_gets_what_ended_since_and_of_much_the_newest() -> None:
    notes = journal()
    for _ in range(10):
        play(notes)
    assert numbers(notes.since(7, most=5)) == [8, 9, 10]
    assert numbers(notes.since(2, most=3)) == [8, 9, 10]
    assert notes.since(10, most=5) == []


def test_turns_are_told_in_the_order_in_which_they_ended() -> None:
    notes = journal()
    with notes.turn("", "m", "", cold()):
        play(notes)
        assert (notes.running_count, numbers(notes.since(0, most=5))) == (1, [2])
    assert (notes.running_count, numbers(notes.since(0, most=5))) == (0, [2, 1])


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (ApiError(503, "no room"), "error_503"),
        (ConnectionError(), "client_gone"),
        (LookupError(), "failed"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_a_turn_that_fails_is_noted_all_the_same(error: BaseException, result: str) -> None:
    notes = journal()

    def fail() -> None:
        with notes.turn("", "m", "", cold()):
            raise error

    with pytest.raises(type(error)):
        fail()
    assert notes.running_count == 0
    assert notes.tally.results == {result: 1}


@pytest.mark.parametrize("miss", ["first_turn", "no_keys", "reuse_off", "unsupported_request", "not_needed"])
def test_turns_with_nothing_to_gain_are_no_misses_of_the_hit_rate(miss: str) -> None:
    notes = journal()
    play(notes, outcome=cold(miss))
    assert (notes.tally.continued, notes.tally.misses[miss]) == (0, 1)


def test_the_hit_rate_counts_turns_that_reused_among_those_that_could() -> None:
    notes = journal()
    for outcome in (cold("first_turn"), warm(), appended(), cold("not_found")):
        play(notes, outcome=outcome)
    play(notes, outcome=warm(), result="error_502")
    assert (notes.tally.reused, notes.tally.continued) == (2, 3)


def test_reasons_that_peers_make_up_do_not_grow_without_end() -> None:
    notes = journal()
    for number in range(MAX_REASONS + 40):
        play(notes, outcome=cold(f"claim:made_up_{number}"))
    assert len(notes.tally.misses) == MAX_REASONS + 1
    assert notes.tally.misses["other"] == 40


def test_turns_of_which_one_goes_on_from_the_other_are_one_conversation() -> None:
    notes = journal()
    play(notes, keys("a"))
    play(notes, keys("other"))
    middle = play(notes, keys("a", "b", "c"))
    play(notes, keys("a", "b", "c", "d", "e"))
    play(notes, keys("other", "b", "c"))
    assert numbers(notes.conversation(middle)) == [1, 3, 4]


def test_a_common_opening_does_not_make_two_branches_one_conversation() -> None:
    notes = journal()
    play(notes, keys("a"))
    one = play(notes, keys("a", "b", "c"))
    other = play(notes, keys("a", "b", "d"))
    assert numbers(notes.conversation(one)) == [1, 2]
    assert numbers(notes.conversation(other)) == [1, 3]


def test_a_session_is_one_conversation_whatever_its_messages_are() -> None:
    notes = journal()
    first = play(notes, keys("a", session=b"one"))
    play(notes, keys("a", session=b"two"))
    play(notes, keys("summary of a", session=b"one"))
    assert numbers(notes.conversation(first)) == [1, 3]
    assert numbers(notes.under(session_key(b"one"))) == [1, 3]


def test_nothing_is_one_conversation_across_scopes() -> None:
    notes = journal()
    first = play(notes, keys("a", session=b"one"))
    play(notes, keys("a", session=b"one"), scope="another tenant's")
    assert numbers(notes.conversation(first)) == [1]


def test_a_turn_without_keys_stands_alone() -> None:
    notes = journal()
    play(notes)
    assert numbers(notes.conversation(play(notes))) == [2]


def test_responses_that_name_the_one_before_are_one_conversation() -> None:
    def body(**fields: str) -> TurnKeys:
        text = ", ".join(f'"{name}": "{value}"' for name, value in {"model": "m", "input": "hi", **fields}.items())
        return keys_of(parse_body(Endpoint.RESPONSES, f"{{{text}}}".encode()), None)

    notes = journal()
    first, second, third = play(notes, body()), play(notes, body(previous_response_id="resp_1")), play(notes, body())
    first.own = second.find
    assert numbers(notes.conversation(first)) == [1, 2]
    assert numbers(notes.conversation(third)) == [3]
