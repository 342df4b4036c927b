"""What commands refuse before they ask anybody, and what they say of themselves."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from backhaul_cli.__main__ import cli
from backhaul_cli.commands.trace import _lines
from backhaul_cli.exits import Exit, failed
from backhaul_cli.output import plain
from backhaul_cli.services import Services
from backhaul_cli.settings import Settings
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
        *(
            ((*command, option, word), f"'{word}' is no number of seconds")
            for *command, option in (("drain", "d", "--within-s"), ("top", "--every-s"), ("nodes", "--timeout-s"))
            for word in ("nan", "NaN")
        ),
        (("drain", "d", "--within-s", "inf"), "is not in the range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_command_line_is_refused_with_what_is_wrong(arguments: tuple[str, ...], told: str) -> None:
    result = run(*arguments)
    assert result.exit_code == Exit.USAGE
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


def test_log_lines_of_a_turn_are_those_with_its_id_and_those_of_its_trace_in_all_logs(tmp_path: Path) -> None:
    router, agent = tmp_path / "router.log", tmp_path / "agent.log"
    lines = [
        '{"event": "turn", "request_id": "r-1", "trace_id": "abc"}',
        '{"event": "claim granted", "trace_id": "abc"}',
        '{"event": "turn", "request_id": "r-2", "trace_id": "def"}',
        "not json, of nobody",
    ]
    router.write_text("\n".join(lines))
    agent.write_text("trace_id=abc event=claimed\ntrace_id=def event=claimed\n")
    found = [(path.name, line) for path, line in _lines([agent, router], "r-1")]
    assert found == [("agent.log", "trace_id=abc event=claimed"), *(("router.log", line) for line in lines[:2])]


def test_the_logs_are_read_though_no_registry_answers(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text("request_id=r-1 event=turn\n")
    result = run("trace", "r-1", "--log", str(log), "--registry", NOBODY)
    assert result.exit_code == Exit.UNREACHABLE
    assert "event=turn" in result.stdout
    assert "no registry answers" in result.stderr


def test_a_router_that_does_not_answer_is_named_with_its_option() -> None:
    result = run("release", "--conversation", "c", "--router-grpc", NOBODY)
    assert result.exit_code == Exit.UNREACHABLE
    assert f"no router answers at {NOBODY} (--router-grpc)" in result.output


def test_a_key_is_taken_nowhere_else_and_odd_answers_are_no_fault() -> None:
    answers = {"/moved": (307, {"location": "/elsewhere"}, b"{}"), "/deep": (200, {}, b"[" * 100_000)}
    with answering(answers) as (url, asked), Services(settings(url)) as services:
        assert services.http("/moved") == (307, {})
        assert services.http("/deep") == (200, {})
    assert asked == ["/moved", "/deep"]


def test_what_does_not_speak_http_is_said_not_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def babble() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\0\0\x12\x04\0 and no HTTP\r\n\r\n")

        with ThreadPoolExecutor() as pool:
            pool.submit(babble)
            result = run("doctor", "--json", "--registry", NOBODY, "--router", f"http://{address}")
    assert f"what answers at http://{address} does not speak HTTP (--router)" in result.stdout


def test_output_that_cannot_be_written_ends_in_words() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "backhaul_cli", "completion", "bash"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (Exit.FAILED, "Error: cannot write: No space left on device\n")


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Who runs tests in the background of a script has SIGINT ignored, by all that is started, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_who_interrupts_a_command_gets_130_and_no_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "backhaul_cli", "nodes", "--timeout-s", "60"]
        where = ["--registry", f"127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen([*command, *where], stderr=subprocess.PIPE, text=True) as asking:
            connection, _ = silent.accept()
            with connection:
                asking.send_signal(signal.SIGINT)
                _, said = asking.communicate(timeout=60)
    assert (asking.returncode, "Traceback" in said) == (Exit.INTERRUPTED, False)


@contextmanager
def answering(answers: dict[str, tuple[int, dict[str, str], bytes]]) -> Iterator[tuple[str, list[str]]]:
    """A router's HTTP address where these are the answers; and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, headers, body = answers.get(self.path, (404, {}, b""))
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def settings(router: str) -> Settings:
    return Settings(
        registries=(NOBODY,),
        router=router,
        router_grpc=NOBODY,
        tls=None,
        registry_name="",
        agent_name="",
        router_name="",
        key="secret",
        timeout_s=10,
        as_json=False,
    )
