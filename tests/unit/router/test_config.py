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
    ],
    ids=" ".join,
)
def test_a_wrong_setting_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(Config, prog="backhaul-router", argv=argv)
    assert caught.value.code == 2
