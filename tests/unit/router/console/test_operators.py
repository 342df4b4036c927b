"""Who may look at the console."""

import hashlib

import pytest

from backhaul_router.core.console.operators import Operators, parse_operators
from backhaul_router.core.errors import ApiError
from backhaul_router.keys import line_for, new_key


def test_the_line_that_the_key_command_prints_is_a_key_file() -> None:
    key = new_key()
    operators = parse_operators(line_for(key))
    operators.check(f"Bearer {key}")
    operators.check(f"bearer  {key} ")


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Basic KEY", "Bearer other", "KEY"])
def test_nobody_else_is_let_in(given: str | None) -> None:
    key = new_key()
    with pytest.raises(ApiError) as caught:
        parse_operators(line_for(key)).check(given and given.replace("KEY", key))
    assert caught.value.status == 401


def test_each_of_several_keys_is_let_in() -> None:
    keys = [new_key(), new_key()]
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    operators = parse_operators(f"key_sha256 = {digests}")
    for key in keys:
        operators.check(f"Bearer {key}")


def test_without_keys_everybody_is_let_in() -> None:
    Operators().check(None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "key_sha256 = []",
        'key_sha256 = "abc"',
        'key_sha256 = ["the key itself"]',
        "key_sha256 = [1]",
        f'key_sha256 = ["{hashlib.sha256(b"").hexdigest()}"]',
        f'key_sha256 = ["{"A" * 64}"]',
        f'key_sha256 = ["{"a" * 64}"]\nkey = "bhk_secret"',
        "not toml",
    ],
)
def test_a_file_that_is_none_is_refused_without_repeating_a_key(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_operators(text)
    assert "secret" not in str(caught.value)
    assert "itself" not in str(caught.value)
