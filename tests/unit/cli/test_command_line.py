"""What commands refuse before they ask anybody, and what they say of themselves."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from backhaul_cli.__main__ import cli
from backhaul_cli.commands.trace import _lines
from backhaul_cli.exits import Exit, failed
from backhaul_cli.output import plain
from backhaul_common.errors import (
    BackhaulError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)

COMMANDS = ("nodes", "blocks", "conversation", "top", "trace", "drain", "release", "explain", "doctor")
NOBODY = "127.0.0.1:1"


def run(*arguments: str, **env: str) -> Result:
    return CliRunner(env=env).invoke(cli, arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_asks_takes_json_tls_and_a_key(command: str) -> None:
    told = run(command, "--help").output
    for option in ("--json", "--tls-ca", "--tls-cert", "--key-file", "--timeout-s", "BACKHAUL_CLI_REGISTRY"):
        assert option in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nodes", "--registry", "nowhere"), "host:port"),
        (("nodes", "--registry", ","), "at least one"),
        (("doctor", "--router", "host:80"), "must be a URL"),
        (("nodes", "--tls-cert", "a.pem"), "go together"),
        (("nodes", "--tls-cert", "a.pem", "--tls-key", "a.key"), "need --tls-ca"),
        (("nodes", "--tls-ca", "/no/such.pem"), "/no/such.pem"),
        (("nodes", "--key-file", "/no/such"), "--key-file cannot be read"),
        (("nodes", "--unknown"), "No such option"),
        (("release",), "give --conversation ID, or --node NODE"),
        (("release", "--node", "d"), "give --conversation ID, or --node NODE"),
        (("release", "--conversation", "c", "--node", "d", "s"), "give --conversation ID, or --node NODE"),
        (("drain", "d", "--within-s", "-1"), "--within-s"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_command_line_is_refused_with_what_is_wrong(arguments: tuple[str, ...], told: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (Exit.USAGE, Exit.FAILED)
    assert told in result.output


def test_where_no_registry_answers_the_command_ends_with_3_and_says_what_it_tried() -> None:
    result = run("nodes", BACKHAUL_CLI_REGISTRY=f"{NOBODY},[::1]:1")
    assert result.exit_code == Exit.UNREACHABLE
    assert f"no registry answers at {NOBODY}, [::1]:1" in result.output


def test_doctor_without_anybody_says_so_as_a_finding() -> None:
    result = run("doctor", "--json", "--registry", NOBODY, "--router", f"http://{NOBODY}")
    assert result.exit_code == Exit.FOUND
    assert [one["check"] for one in json.loads(result.stdout)] == ["registry-unreachable", "router-unreachable"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnavailableError, 3),
        (DeadlineExceededError, 3),
        (PermissionDeniedError, 4),
        (UnauthenticatedError, 4),
        (NotFoundError, 5),
        (FailedPreconditionError, 1),
    ],
)
def test_each_kind_of_refusal_has_its_exit_code(error: type[BackhaulError], code: int) -> None:
    assert failed(error("REASON", "why")).exit_code == code


def test_the_exit_codes_are_told_by_help_too() -> None:
    told = " ".join(run("--help").output.split())
    for code in Exit:
        assert f"{int(code)} " in told


def test_what_others_say_does_nothing_to_a_terminal() -> None:
    assert plain("\x1b[2Jgone\r\nü 10 ms") == " [2Jgone  ü 10 ms"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_completion_script(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_BACKHAUL_COMPLETE" in result.output


def test_up_hands_everything_to_the_local_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, arguments: ran.append(arguments))
    assert run("up", "--simulated", "--prefill", "2").exit_code == 0
    assert ran[0][1:] == ["-m", "backhaul_local", "up", "--simulated", "--prefill", "2"]


def test_up_says_where_the_local_stack_is_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("up")
    assert result.exit_code == Exit.FAILED
    assert "deploy/local" in result.output


def test_log_lines_of_a_turn_are_those_with_its_id_and_those_of_its_trace(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    lines = [
        '{"event": "turn", "request_id": "r-1", "trace_id": "abc"}',
        '{"event": "claim granted", "trace_id": "abc"}',
        '{"event": "turn", "request_id": "r-2", "trace_id": "def"}',
        "not json, of nobody",
    ]
    log.write_text("\n".join(lines))
    assert [line for _, line in _lines(log, "r-1")] == lines[:2]
