"""Stop strings in a text that grows word by word."""

from collections.abc import Sequence

import pytest

from backhaul_simulator.answer_text import AnswerText

TOKENS = (100, 200, 300, 400)
"""Their text: " t100 t200 t300 t400"."""


def _run(stop: Sequence[str], *, include: bool = False, min_tokens: int = 0) -> tuple[str | None, str, list[str]]:
    """Returns the stop string that ended it, the whole text, and the pieces that were shown."""
    text = AnswerText(stop=stop, include_stop=include, min_tokens=min_tokens)
    pieces = []
    found = None
    for index, token in enumerate(TOKENS):
        found = text.add(token, ends=False)
        pieces.append(text.delta(finished=found is not None or index == len(TOKENS) - 1))
        if found is not None:
            break
    return found, text.text, pieces


@pytest.mark.parametrize(
    ("stop", "include", "min_tokens", "found", "text"),
    [
        pytest.param([], False, 0, None, " t100 t200 t300 t400", id="none"),
        pytest.param(["t200"], False, 0, "t200", " t100 ", id="a whole word"),
        pytest.param(["t200"], True, 0, "t200", " t100 t200", id="left in"),
        pytest.param(["00 t3"], False, 0, "00 t3", " t100 t2", id="across tokens"),
        pytest.param(["t300", "0 t2"], False, 0, "0 t2", " t10", id="the first to be complete"),
        pytest.param(["t100"], False, 2, None, " t100 t200 t300 t400", id="before the least length"),
        pytest.param(["00"], False, 2, "00", " t100 t200 t3", id="again after the least length"),
        pytest.param(["nothing"], False, 0, None, " t100 t200 t300 t400", id="never"),
    ],
)
def test_the_text_ends_at_a_stop_string(
    stop: list[str], include: bool, min_tokens: int, found: str | None, text: str
) -> None:
    got, whole, pieces = _run(stop, include=include, min_tokens=min_tokens)

    assert (got, whole) == (found, text)
    assert "".join(pieces) == text


def test_what_may_be_the_beginning_of_a_stop_string_is_not_shown_yet() -> None:
    _, _, pieces = _run(["t200 t300x"])

    assert pieces[:2] == ["", " "]


def test_the_token_that_the_engine_stops_at_has_no_text() -> None:
    text = AnswerText(stop=(), include_stop=False, min_tokens=0)
    text.add(100, ends=False)

    text.add(200, ends=True)

    assert text.text == " t100"
