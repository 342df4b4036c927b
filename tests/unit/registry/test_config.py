from typing import Any

import pytest
from pydantic import ValidationError

from backhaul_common.config import load_config
from backhaul_common.tls import TlsFiles
from backhaul_registry.config import Config


def load(*argv: str) -> Config:
    return load_config(Config, prog="backhaul-registry", argv=argv)


def test_flags_reach_the_etcd_client() -> None:
    config = load(
        *("--etcd-endpoints", "a:1,b:2", "--etcd-ca", "ca.pem", "--etcd-cert", "c.pem", "--etcd-key", "k.pem"),
        *("--etcd-user", "u", "--etcd-password", "hunter2"),
    )
    assert config.etcd.endpoints == ("a:1", "b:2")
    assert config.etcd_files == TlsFiles(ca="ca.pem", cert="c.pem", key="k.pem")
    assert (config.etcd.user, config.etcd.password) == ("u", "hunter2")
    assert "hunter2" not in repr(config) + repr(config.etcd)


@pytest.mark.parametrize(
    "argv",
    [
        ("--etcd-endpoints", ""),
        ("--etcd-endpoints", "http://127.0.0.1:2379"),
        ("--listen", "127.0.0.1:99999"),
        ("--cluster", "a/b"),
        ("--etcd-cert", "c.pem"),
        ("--etcd-cert", "c.pem", "--etcd-key", "k.pem"),
        ("--etcd-user", "u"),
        ("--log-level", "loud"),
        ("--pointer-ttl-s", "0"),
        ("--nonsense", "1"),
    ],
    ids=" ".join,
)
def test_a_wrong_setting_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 2


def test_defaults_are_the_local_stack() -> None:
    config = Config()
    assert (config.listen, config.etcd_endpoints, config.cluster) == ("127.0.0.1:7100", ("127.0.0.1:2379",), "default")
    unknown: dict[str, Any] = {"unknown": 1}
    with pytest.raises(ValidationError):
        Config(**unknown)
