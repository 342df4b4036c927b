"""Which engines can reuse blocks, by how they were started."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backhaul_connector import engine

SOCKET = "/run/backhaul/decode-1.sock"


def config(policy: str = "fail", **extra: Any) -> Any:
    """Returns what vLLM makes of --kv-transfer-config, as far as it is looked at."""
    extra = {"bidirectional_kv_xfer": True, **extra}
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy=policy)
    return cast("Any", SimpleNamespace(kv_transfer_config=transfer))


@pytest.fixture
def device_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this looks at is vLLM's platform, which only an engine has."""
    monkeypatch.setattr(engine, "_uses_host_buffer", lambda config: False)


@pytest.mark.usefixtures("device_buffer")
def test_an_engine_that_was_started_as_documented_can() -> None:
    assert engine.reuse_problem(config(), SOCKET) == ""
    assert engine.reuse_problem(config(kv_lease_duration=180), SOCKET) == ""
    assert engine.reuse_problem(config(kv_lease_duration=15), SOCKET) == ""


@pytest.mark.parametrize(
    ("started", "socket", "named"),
    [
        (config(bidirectional_kv_xfer=False), SOCKET, "bidirectional_kv_xfer"),
        (config("recompute"), SOCKET, "kv_load_failure_policy"),
        (config(kv_lease_duration=14), SOCKET, "kv_lease_duration"),
        (config(), "", "BACKHAUL_AGENT_SOCKET"),
    ],
)
def test_any_other_says_what_to_set(started: Any, socket: str, named: str) -> None:
    assert named in engine.reuse_problem(started, socket)


def test_blocks_in_host_buffers_cannot_be_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_uses_host_buffer", lambda config: True)
    assert "kv_buffer_device" in engine.reuse_problem(config(), SOCKET)


@pytest.mark.parametrize(
    ("started", "tokens"),
    [
        ({}, math.inf),
        ({"enable_chunked_prefill": False}, 2048),
        ({"enable_chunked_prefill": False, "max_num_scheduled_tokens": 1000}, 1000),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 512}, math.inf),
    ],
)
def test_a_step_has_room_for_so_much_of_a_prompt_that_is_not_cut(started: dict[str, Any], tokens: float) -> None:
    scheduler = {
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "max_num_scheduled_tokens": None,
        "max_num_batched_tokens": 2048,
        **started,
    }
    made = SimpleNamespace(scheduler_config=SimpleNamespace(**scheduler))
    assert engine.whole_prompt_tokens(cast("Any", made)) == tokens
