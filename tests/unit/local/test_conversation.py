"""The demo conversation and the table made of it."""

import io

import pytest
from rich.console import Console

from backhaul_local.conversation import Turn, document
from backhaul_local.table import comparison, verdict


def turn(text: str = "same", *, route: str = "warm", miss_reason: str = "", ttft_s: float = 0.1) -> Turn:
    return Turn(
        route=route,
        miss_reason=miss_reason,
        prompt_tokens=1000,
        local_tokens=800,
        read_tokens=150,
        ttft_s=ttft_s,
        text=text,
    )


def shown(*turns: Turn) -> str:
    paper = io.StringIO()
    Console(width=80, file=paper).print(comparison(turns, [turn(route="cold", ttft_s=0.3) for _ in turns]))
    return paper.getvalue()


def test_the_document_has_the_length_asked_for_and_is_always_the_same() -> None:
    assert len(document(1234).split()) == 1234
    assert document(50) == document(50)


def test_what_was_neither_cached_nor_read_was_computed() -> None:
    assert turn().computed_tokens == 50


def test_the_table_shows_every_turn_within_eighty_columns() -> None:
    lines = shown(turn(route="cold", miss_reason="first_turn"), turn()).splitlines()

    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines if "warm" in line] == [
        ["2", "warm", "1,000", "800", "150", "50", "100", "ms", "300", "ms", "3.0x"]
    ]


def test_two_cold_turns_are_not_compared() -> None:
    rows = [line.split() for line in shown(turn(route="cold"), turn()).splitlines() if " ms" in line]

    assert [row[-1] for row in rows] == ["\N{EN DASH}", "3.0x"]


@pytest.mark.parametrize(("reason", "named"), [("first_turn", False), ("not_found", True)])
def test_a_cold_turn_says_why_unless_it_had_to_be_cold(reason: str, named: bool) -> None:
    assert (reason in shown(turn(route="cold", miss_reason=reason))) is named


def test_equal_texts_are_confirmed() -> None:
    same, sentence = verdict([turn("a"), turn("b")], [turn("a"), turn("b")])

    assert same
    assert "All 2 replies are the same" in sentence


def test_different_texts_are_named_by_their_turns() -> None:
    same, sentence = verdict([turn("a"), turn("b"), turn("c")], [turn("a"), turn("x"), turn("y")])

    assert not same
    assert "turn 2, 3" in sentence
