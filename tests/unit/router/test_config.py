import pytest

from backhaul_common.config import load_config
from backhaul_common.errors import InvalidArgumentError
from backhaul_router.config import Config


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--registry", ""),
        ("--registry", "nowhere"),
        ("--registry", "a:1", "--listen-http", "8080"),
        ("--registry", "a:1", "--listen-grpc", "127.0.0.1:99999"),
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


@pytest.mark.parametrize("files", [56, 64, 256, 1024, 4096])
def test_fewer_open_files_allow_fewer_connections_and_turns(files: int) -> None:
    config = Config(registry=("a:1",))
    afforded = config.within(files)
    needed = afforded.max_connections + afforded.max_connections // 4 + 3 * afforded.max_turns
    assert 1 <= afforded.max_turns < afforded.max_connections < config.max_connections
    assert 44 <= files - needed <= max(56, files // 3)


def test_enough_open_files_change_nothing() -> None:
    config = Config(registry=("a:1",))
    assert config.within(config.open_files) is config


def test_hardly_any_open_files_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(InvalidArgumentError, match="raise the limit"):
        Config(registry=("a:1",)).within(50)
