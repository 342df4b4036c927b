"""Texts that are cut."""

import pytest

from backhaul_common.texts import clip


@pytest.mark.parametrize(
    ("text", "most_bytes", "shown"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abc…"),
        ("ééé", 6, "ééé"),
        ("éééé", 6, "é…"),
        ("", 6, ""),
        ("a\ud800", 6, "a?"),
    ],
)
def test_a_text_is_cut_between_letters_and_shows_that(text: str, most_bytes: int, shown: str) -> None:
    assert clip(text, most_bytes) == shown
    assert len(shown.encode()) <= most_bytes
