"""How an engine's command line is put together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backhaul_local.engines import EngineOptions, EnginePlace, engine_spec, kv_transfer_config

PLACE = EnginePlace(
    name="decode-1",
    python=Path("bin/python"),
    model=Path("model"),
    http_port=8200,
    side_channel_port=5700,
    agent_socket=Path("decode.sock"),
)


def extra(options: EngineOptions) -> dict[str, Any]:
    config: dict[str, Any] = kv_transfer_config(options)["kv_connector_extra_config"]
    return config


def test_the_connector_is_loaded_by_its_module_and_without_nixls_progress_thread() -> None:
    assert kv_transfer_config(EngineOptions())["kv_connector_module_path"] == "backhaul_connector"
    assert extra(EngineOptions())["backhaul_nixl_progress_thread"] is False


def test_without_the_connector_the_configuration_knows_nothing_of_backhaul() -> None:
    assert "backhaul" not in json.dumps(kv_transfer_config(EngineOptions(connector=False)))


def test_the_ttl_is_the_engines_own_and_further_settings_win() -> None:
    options = EngineOptions(ttl_s=5, extra_config={"kv_recompute_threshold": 1})

    assert extra(options)["decoder_kv_blocks_ttl"] == 5
    assert extra(options)["kv_recompute_threshold"] == 1


def test_a_failed_read_is_an_error_because_recomputing_hangs() -> None:
    assert kv_transfer_config(EngineOptions())["kv_load_failure_policy"] == "fail"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        pytest.param(EngineOptions(num_blocks=64), ["--num-gpu-blocks-override", "64"], id="number of blocks"),
        pytest.param(EngineOptions(), ["--dtype", "float32"], id="precision"),
        pytest.param(EngineOptions(), ["--block-size", "32"], id="block size"),
        pytest.param(EngineOptions(), ["--port", "8200"], id="port"),
        pytest.param(EngineOptions(flags=["--api-key", "k"]), ["--api-key", "k"], id="further flags"),
    ],
)
def test_flags_are_on_the_command_line(options: EngineOptions, flag: list[str]) -> None:
    command = list(engine_spec(PLACE, options).command)

    assert flag == command[command.index(flag[0]) :][: len(flag)]


def test_the_environment_names_side_channel_and_agent() -> None:
    env = engine_spec(PLACE, EngineOptions(env={"EXTRA": "1"})).env

    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"
    assert env["BACKHAUL_AGENT_SOCKET"] == "decode.sock"
    assert env["EXTRA"] == "1"


def test_an_engine_without_agent_is_told_of_none() -> None:
    assert "BACKHAUL_AGENT_SOCKET" not in engine_spec(replace(PLACE, agent_socket=None), EngineOptions()).env
