"""Settings of the node agent."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from backhaul_common.config import load_config
from backhaul_node_agent.config import Config


def test_the_node_is_named_for_its_advertised_address() -> None:
    assert Config(advertise="decode-1.example:7201").node == "decode-1.example:7201"
    assert Config(advertise="[fd00::1]:7201").node == "fd00::1:7201"
    assert Config(node_id="decode-1").node == "decode-1"


def test_an_agent_that_listens_everywhere_says_where_it_is() -> None:
    assert Config(listen="0.0.0.0:7201", advertise="10.0.0.2:7201").node == "10.0.0.2:7201"


def test_routers_are_told_the_engines_own_url_unless_another_is_given() -> None:
    told = Config(engine_url="http://127.0.0.1:8200", advertise_engine_url="http://10.0.0.2:8200/")
    assert (told.engine_url, told.advertised_engine_url) == ("http://127.0.0.1:8200", "http://10.0.0.2:8200")
    assert Config(engine_url="http://10.0.0.2:8200").advertised_engine_url == "http://10.0.0.2:8200"


def test_events_of_the_first_engine_are_found_at_an_address_of_zmq() -> None:
    assert Config().kv_events_address is None
    assert Config(kv_events="tcp://[fd00::1]:5557").kv_events_address == ("fd00::1", 5557)


def test_the_socket_is_named_for_the_node() -> None:
    assert Config(node_id="decode-1").socket_path.name == "decode-1.sock"
    assert Config(connector_socket="/tmp/a.sock").socket_path == Path("/tmp/a.sock")


@pytest.mark.parametrize(
    "settings",
    [
        {"role": "both"},
        {"kv_events": "127.0.0.1:5557"},
        {"kv_events": "tcp://*:5557"},
        {"kv_events": "tcp://0.0.0.0:5557"},
        {"kv_events": "tcp://127.0.0.1"},
        {"kv_events": "tcp://127.0.0.1:0"},
        {"weights_digest": "x" * 1025},
        {"engine_lease_s": 14.0},
        {"listen": "7201"},
        {"listen": "::1:7201"},
        {"listen": "0.0.0.0:7201"},
        {"listen": "[::]:7201"},
        {"advertise": "0.0.0.0:7201"},
        {"registry": ()},
        {"registry": ("nowhere",)},
        {"engine_url": "127.0.0.1:8200"},
        {"engine_url": "http://127.0.0.1:8200/v1"},
        {"engine_url": "http://:8200"},
        {"engine_url": "http://[::1:8200"},
        {"engine_url": ""},
        {"advertise_engine_url": "10.0.0.2:8200"},
        {"advertise_engine_url": "http://10.0.0.2:8200/v1"},
        {"advertise_engine_url": "http://10.0.0.2:82000"},
        {"advertise_engine_url": "http://10.0.0.2:http"},
        {"engine_url": "http://127.0.0.1:0"},
        {"node_id": "a/b"},
        {"lease_ttl_s": 1.0},
        {"lease_ttl_s": 61.0},
        {"lease_ttl_s": 3.0, "lease_margin_s": 1.5},
        {"claim_ttl_s": 5.0},
        {"margin_s": -1.0},
        {"pressure_mark": 0.0},
        {"retained_share": 0.8, "pressure_mark": 0.7},
        {"retention_policy": "fifo"},
        {"max_retention_s": 20.0},
        {"max_retention_s": 1e6},
        {"unknown": 1},
    ],
    ids=lambda settings: next(iter(settings.items())),
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Config(**settings)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_NODE_AGENT_ROLE", "prefill")
    monkeypatch.setenv("BACKHAUL_NODE_AGENT_REGISTRY", "a:1,b:2")
    config = load_config(Config, prog="agent", argv=["--role", "decode", "--claim-ttl-s", "20"])
    assert (config.role, config.registry, config.claim_ttl_s) == ("decode", ("a:1", "b:2"), 20.0)


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_NODE_AGENT_ROLL", "prefill")
    with pytest.raises(SystemExit) as error:
        load_config(Config, prog="agent", argv=[])
    assert error.value.code == 2
