"""Settings are what the operator wrote, or an error that names what is wrong with it."""

from typing import Any

import pytest

from backhaul_connector.settings import Settings


def test_every_setting_is_read() -> None:
    extra = {
        "backhaul_agent_socket": "/run/a.sock",
        "backhaul_min_verified": 128,
        "backhaul_weights_digest": "abc",
        "backhaul_nixl_progress_thread": False,
        "backhaul_max_queued": 5,
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": "left to vLLM",
    }

    assert Settings.of(extra, {}) == Settings("/run/a.sock", 128, "abc", False, 5)


def test_the_defaults_need_nothing() -> None:
    assert Settings.of({}, {}) == Settings("", 64, "", True, 10_000)


@pytest.mark.parametrize(
    ("extra", "socket"),
    [({}, "/env.sock"), ({"backhaul_agent_socket": "/extra.sock"}, "/extra.sock"), ({"backhaul_agent_socket": ""}, "")],
)
def test_the_socket_falls_back_to_the_environment(extra: dict[str, Any], socket: str) -> None:
    assert Settings.of(extra, {"BACKHAUL_AGENT_SOCKET": "/env.sock"}).agent_socket == socket


@pytest.mark.parametrize(
    "key", ["backhaul_agent_sockets", "backhaul_", "backhaul_of", "backhaul_backhaul_agent_socket"]
)
def test_an_unknown_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"unknown setting {key}; known: backhaul_agent_socket, "):
        Settings.of({key: ""}, {})


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("backhaul_min_verified", "64", "int"),
        ("backhaul_min_verified", True, "int"),
        ("backhaul_min_verified", 64.0, "int"),
        ("backhaul_min_verified", None, "int"),
        ("backhaul_nixl_progress_thread", 0, "bool"),
        ("backhaul_nixl_progress_thread", "false", "bool"),
        ("backhaul_agent_socket", 5, "str"),
        ("backhaul_weights_digest", None, "str"),
    ],
)
def test_a_wrong_type_is_named(key: str, value: object, kind: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must be of type {kind}, got {value!r}"):
        Settings.of({key: value}, {})


def test_a_queue_that_takes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="backhaul_max_queued must be at least 1, got 0"):
        Settings.of({"backhaul_max_queued": 0}, {})
