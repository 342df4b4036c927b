"""The launcher's command line: what it refuses before anything starts, and what it says of itself."""

import pytest

from backhaul_local.command import UP, run_command


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
        run_command(argv)
    assert caught.value.code == 2
    assert f"argument {argv[1]}: {argv[2]} is not a number of 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "default"), [("run", "1"), ("up", "1, simulated: 2")])
def test_help_names_one_default(command: str, default: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command([command, "--help"])
    assert f"prefill engines (default: {default}) --decode" in " ".join(capsys.readouterr().out.split())


def test_the_snippet_that_is_shown_is_python_and_shows_all_that_the_router_says() -> None:
    names = ("front", "url", "grpc", "logs", "registries", "agents", "model", "engines")
    shown = UP.format(**{name: f"<{name}>" for name in names})
    snippet = shown[shown.index("import uuid") : shown.index("(The first word")]
    compile(snippet, "snippet", "exec")
    assert 'name.startswith("x-backhaul-")' in snippet
