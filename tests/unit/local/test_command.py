"""The launcher's command line: what it refuses before anything starts, and what it says of itself."""

import pytest

from backhaul_local.__main__ import main


@pytest.mark.parametrize(
    "argv",
    [
        *(["run", flag, "0"] for flag in ("--turns", "--document-words", "--reply-tokens")),
        *(["up", flag, "0"] for flag in ("--prefill", "--decode", "--etcd-members", "--registries", "--routers")),
        ["up", "--decode", "-1"],
        ["run", "--turns", "many"],
    ],
    ids=" ".join,
)
def test_what_is_not_one_or_more_of_a_thing_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert f"argument {argv[1]}: {argv[2]} is not a number of 1 or more" in capsys.readouterr().err


def test_help_names_one_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    assert "prefill engines (default: 1, simulated: 2) --decode" in " ".join(capsys.readouterr().out.split())
