"""The launcher's command line: what it refuses before anything starts, and what it says of itself."""

from pathlib import Path

import pytest

from backhaul_local.command import UP, how_to_call, run_command
from backhaul_local.secured import StackTls


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


@pytest.mark.parametrize("secure", [False, True])
def test_the_snippet_that_is_shown_is_python_and_shows_all_that_the_router_says(tmp_path: Path, secure: bool) -> None:
    names = (
        "front",
        "url",
        "grpc",
        "planner",
        "console",
        "logs",
        "registries",
        "agents",
        "metrics",
        "model",
        "engines",
    )
    tls = StackTls(tmp_path) if secure else None
    shown = UP.format(**{name: f"<{name}>" for name in names}, **how_to_call(tls))
    snippet = shown[shown.index("import uuid") : shown.index("(The first word")]
    compile(snippet, "snippet", "exec")
    assert 'name.startswith("x-backhaul-")' in snippet
    assert [f"--cacert {tmp_path}/ca.pem" in shown, "verify=tls" in snippet] == [secure, secure]


def test_certificates_are_made_where_they_are_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert run_command(["certs", "--folder", str(folder), "--hosts", "10.0.0.2"]) == 0
    assert (folder / "router.pem").exists()
    (folder / "ca.pem").write_text("no certificate")
    assert run_command(["certs", "--folder", str(folder)]) == 1
    assert "error: no certificates made: " in capsys.readouterr().out
