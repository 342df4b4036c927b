"""Keys that are made, and their lines for the tenants file."""

import io

import pytest

from backhaul_router.core.tenants import parse_tenants
from backhaul_router.keys import line_for, main, new_key


def test_what_it_prints_lets_its_key_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    key, line = capsys.readouterr().out.splitlines()
    assert parse_tenants(f"[tenants.a]\n{line}").authenticate(f"Bearer {key}") == "a"
    assert key not in line


def test_keys_are_long_differ_and_can_be_recognised() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("bhk_") and len(key) == 47 for key in keys)


def test_a_key_that_exists_is_hashed_and_not_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    monkeypatch.setattr("sys.stdin", io.StringIO(key + "\n"))
    assert main(["--stdin"]) == 0
    assert capsys.readouterr().out == line_for(key) + "\n"


@pytest.mark.parametrize("key", ["", "hunter2", "correct horse battery", "a" * 40, "0123456789abcdef" * 1, "ü" * 40])
def test_what_somebody_could_guess_is_refused_and_not_repeated(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(key))
    assert main(["--stdin"]) == 1
    told = capsys.readouterr()
    assert (told.out, "must be random" in told.err) == ("", True)
    assert not key or key not in told.err


def test_what_no_header_can_carry_is_refused() -> None:
    for odd in ("ü", " ", "\t"):
        with pytest.raises(ValueError, match="printable ASCII"):
            line_for(new_key() + odd + "x")
