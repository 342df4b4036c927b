from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from backhaul_common.config import load_config
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.run import run_service
from backhaul_router.app import running, serve
from backhaul_router.config import Config


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--registry", ""),
        ("--registry", "nowhere"),
        ("--registry", "a:1", "--listen-http", "8080"),
        ("--registry", "a:1", "--listen-grpc", "127.0.0.1:99999"),
        ("--registry", "a:1", "--listen-ext-proc", "8082"),
        ("--registry", "a:1", "--body-limit", "0"),
        ("--registry", "a:1", "--body-limit", "2GiB"),
        ("--registry", "a:1", "--lookup-budget-s", "nan"),
        ("--registry", "a:1", "--max-turns", "0"),
        ("--registry", "a:1", "--max-queued", "-1"),
        ("--registry", "a:1", "--queue-timeout-s", "0"),
        ("--registry", "a:1", "--max-held", "15MiB"),
        ("--registry", "a:1", "--body-limit", "512MiB"),
        ("--registry", "a:1", "--receive-timeout-s", "0"),
        ("--registry", "a:1", "--lame-duck-s", "-1"),
        ("--registry", "a:1", "--routes", "cold,lukewarm"),
        ("--registry", "a:1", "--routes", "warm,append"),
        ("--registry", "a:1", "--routes", ""),
        ("--registry", "a:1", "--prefer", "lukewarm"),
        ("--registry", "a:1", "--routes", "cold,append", "--prefer", "warm"),
    ],
    ids=" ".join,
)
def test_a_wrong_setting_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(Config, prog="backhaul-router", argv=argv)
    assert caught.value.code == 2


def test_limits_that_contradict_each_other_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(Config, prog="backhaul-router", argv=("--registry", "a:1", "--body-limit", "512MiB"))
    assert "max_held must be at least body_limit (536870912 bytes)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--routes", "cold,lukewarm"), "there is no route 'lukewarm'; there are cold, warm, append"),
        (("--routes", "warm"), "cold must be among them: it is what is left when nothing else works"),
        (
            ("--routes", "cold,append", "--prefer", "warm"),
            "prefer is warm, which is not among the routes (cold, append)",
        ),
    ],
)
def test_what_is_wrong_with_the_routes_is_said(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_config(Config, prog="backhaul-router", argv=("--registry", "a:1", *argv))
    assert message in capsys.readouterr().err


def test_routes_come_from_flags_as_a_list() -> None:
    argv = ("--registry", "a:1", "--routes", "cold,append", "--prefer", "append", "--explain")
    config = load_config(Config, prog="backhaul-router", argv=argv)
    assert (config.routes, config.prefer, config.explain) == (("cold", "append"), "append", True)


def test_by_default_any_route_is_taken_and_nothing_is_explained() -> None:
    config = Config(registry=("a:1",))
    assert (config.routes, config.prefer, config.routing_file, config.explain) == (
        ("cold", "warm", "append"),
        "auto",
        "",
        False,
    )


@pytest.mark.parametrize(
    ("setting", "text", "problem"),
    [
        ("routing_file", None, "No such file or directory"),
        ("routing_file", "[limits]\nalone_token = 1", "limits.alone_token: there is no such setting"),
        ("routing_file", "[limits]\nalone_tokens = -1", "limits.alone_tokens: expected `int` >= 0"),
        ("routing_file", "[decode]\nfilters = ['idle']", "decode.filters: there is no 'idle'"),
        ("routing_file", "[limits", "this is not TOML"),
        ("routing_file", "\xff", "'utf-8' codec can't decode"),
        ("tenants_file", "[tenants", ""),
    ],
)
async def test_a_router_does_not_start_with_a_file_that_it_cannot_use_and_says_which(
    tmp_path: Path, setting: str, text: str | None, problem: str
) -> None:
    path = tmp_path / "file.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgumentError) as caught:
        async with running(Config.model_validate({"registry": ("a:1",), setting: str(path)})):
            pytest.fail("it runs")
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("flag", ["--routing-file", "--tenants-file"])
def test_a_file_that_cannot_be_used_ends_the_process_with_an_error(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text("[unknown]")
    config = load_config(Config, prog="backhaul-router", argv=("--registry", "a:1", flag, str(path)))
    with capture_logs() as logs:
        assert run_service(lambda stopping: serve(config, stopping)) == 1
    assert [str(path) in line["error"] for line in logs if line["event"] == "service failed"] == [True]


@pytest.mark.parametrize("files", [56, 64, 256, 1024, 4096])
def test_fewer_open_files_allow_fewer_connections_and_turns(files: int) -> None:
    config = Config(registry=("a:1",))
    afforded = config.within(files)
    needed = 2 * afforded.max_connections + afforded.max_connections // 4 + 3 * afforded.max_turns
    assert 1 <= afforded.max_turns < afforded.max_connections < config.max_connections
    assert 44 <= files - needed <= max(56, files // 3)


def test_enough_open_files_change_nothing() -> None:
    config = Config(registry=("a:1",))
    assert config.within(config.open_files) is config


def test_hardly_any_open_files_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(InvalidArgumentError, match="raise the limit"):
        Config(registry=("a:1",)).within(50)


def test_a_console_that_others_reach_wants_keys() -> None:
    with pytest.raises(ValidationError, match="console_key_file"):
        Config(registry=("r:1",), listen_console="0.0.0.0:8090")
    with pytest.raises(ValidationError, match="console_key_file"):
        Config(registry=("r:1",), listen_console="127.0.0.1:8090", tenants_file="tenants.toml")
    with pytest.raises(ValidationError, match="listen_console"):
        Config(registry=("r:1",), console_key_file="keys.toml")
    Config(registry=("r:1",), listen_console="0.0.0.0:8090", console_key_file="keys.toml")
    Config(registry=("r:1",), listen_console="127.0.0.1:8090")
