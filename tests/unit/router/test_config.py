import pytest

from backhaul_common.config import load_config
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
