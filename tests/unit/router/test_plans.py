"""What may be told of a planned turn, in which order, and by when."""

import pytest

from backhaul_common.errors import BackhaulError
from backhaul_router.core import plans
from backhaul_router.core.plans import PlanBook, State, Step, Told

SEND_S, REPORT_S = 10.0, 60.0


@pytest.fixture
def book() -> PlanBook:
    book = PlanBook(send_s=SEND_S, report_s=REPORT_S)
    book.add("t", "north", 0.0)
    return book


def refusal(book: PlanBook, step: Step, *, now: float = 1.0, turn_id: str = "t", tenant: str = "north") -> str:
    """Returns why a report is refused; with a turn that is over, how it ended."""
    with pytest.raises(BackhaulError) as caught:
        book.tell(turn_id, tenant, step, now)
    return caught.value.metadata.get("how", caught.value.reason)


def test_a_turn_is_sent_begins_to_answer_and_is_done(book: PlanBook) -> None:
    assert book.tell("t", "north", Step.SENDING, 1.0) == Told(new=True, over=False, state=State.PLANNED)
    assert book.tell("t", "north", Step.FIRST_BYTE, 2.0) == Told(new=True, over=False, state=State.SENDING)
    assert book.tell("t", "north", Step.DONE, 3.0) == Told(new=True, over=True, state=State.ANSWERING)


@pytest.mark.parametrize("steps", [[Step.SENDING], [Step.SENDING, Step.FIRST_BYTE], [Step.SENDING, Step.DONE]])
def test_what_was_told_last_may_be_told_again_and_changes_nothing(book: PlanBook, steps: list[Step]) -> None:
    for step in steps:
        told = book.tell("t", "north", step, 1.0)

    assert book.tell("t", "north", steps[-1], 2.0) == Told(new=False, over=told.over, state=book_state(steps))


def book_state(steps: list[Step]) -> State:
    return {Step.SENDING: State.SENDING, Step.FIRST_BYTE: State.ANSWERING, Step.DONE: State.PLANNED}[steps[-1]]


@pytest.mark.parametrize("step", [Step.FAILED, Step.LEFT])
@pytest.mark.parametrize("before", [[], [Step.SENDING], [Step.SENDING, Step.FIRST_BYTE]])
def test_a_turn_can_fail_or_be_left_at_any_time(book: PlanBook, before: list[Step], step: Step) -> None:
    for earlier in before:
        book.tell("t", "north", earlier, 1.0)

    assert book.tell("t", "north", step, 2.0).over


@pytest.mark.parametrize("step", [Step.FIRST_BYTE, Step.DONE])
def test_no_answer_without_sending(book: PlanBook, step: Step) -> None:
    assert refusal(book, step) == "NOT_SENDING"
    assert not book.tell("t", "north", Step.SENDING, 2.0).over


@pytest.mark.parametrize("end", [Step.FAILED, Step.LEFT])
@pytest.mark.parametrize("step", [Step.SENDING, Step.FIRST_BYTE, Step.DONE])
def test_a_turn_that_is_over_is_not_sent_and_ends_no_other_way(book: PlanBook, end: Step, step: Step) -> None:
    book.tell("t", "north", end, 1.0)

    assert refusal(book, step) == end.value


def test_a_turn_that_is_not_sent_in_time_is_given_up_and_must_not_be_sent(book: PlanBook) -> None:
    assert book.overdue(SEND_S - 0.1) == []
    assert book.overdue(SEND_S) == ["t"]
    assert book.overdue(SEND_S) == []
    assert refusal(book, Step.SENDING, now=SEND_S + 1) == plans.GIVEN_UP


def test_it_is_too_late_to_send_although_nobody_has_looked_yet(book: PlanBook) -> None:
    assert refusal(book, Step.SENDING, now=SEND_S) == plans.GIVEN_UP
    assert book.overdue(SEND_S) == ["t"]


def test_each_report_gives_time_for_the_next(book: PlanBook) -> None:
    book.tell("t", "north", Step.SENDING, SEND_S - 1)
    book.tell("t", "north", Step.SENDING, REPORT_S)

    assert book.overdue(2 * REPORT_S - 1) == []
    assert book.overdue(2 * REPORT_S) == ["t"]


def test_other_tenants_turns_are_unknown_running_or_over(book: PlanBook) -> None:
    assert refusal(book, Step.SENDING, tenant="south") == "TURN_UNKNOWN"
    book.tell("t", "north", Step.LEFT, 1.0)
    assert refusal(book, Step.LEFT, tenant="south") == "TURN_UNKNOWN"
    assert refusal(book, Step.LEFT, turn_id="other") == "TURN_UNKNOWN"


def test_ends_are_forgotten_after_a_while_and_beyond_a_number(book: PlanBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_REMEMBERED", 1)
    book.tell("t", "north", Step.LEFT, 1.0)
    assert refusal(book, Step.LEFT, now=1.0 + plans.REMEMBER_S) == "TURN_UNKNOWN"
    for turn_id in ("u", "v"):
        book.add(turn_id, "north", 2.0)
        book.tell(turn_id, "north", Step.LEFT, 3.0)

    assert refusal(book, Step.LEFT, turn_id="u") == "TURN_UNKNOWN"
    assert book.tell("v", "north", Step.LEFT, 3.0).over
