"""The simulator as a process: how it starts, misbehaves on request, and ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.engine_fixtures import Engines, running_simulated

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = {"prompt": list(range(500, 700)), "max_tokens": 3}


@pytest.fixture
def own_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines that the test may end."""
    with running_simulated(tmp_path_factory.mktemp("p"), agents=False) as engines:
        yield engines


@pytest.fixture
def http(simulated_engines: Engines) -> httpx2.Client:
    return simulated_engines.decode.http


def _script(http: httpx2.Client, *entries: dict[str, Any]) -> None:
    assert http.post("/simulator/faults", json={"next": entries}).status_code == 200


def _left(http: httpx2.Client) -> list[str]:
    return [entry["fault"] for entry in http.get("/simulator/faults").json()["next"]]


def test_told_to_end_it_cuts_what_runs_and_ends_in_good_order(own_engines: Engines) -> None:
    engine = own_engines.decode
    body = {**PROMPT, "max_tokens": 2900, "ignore_eos": True, "stream": True}
    with engine.http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        engine.process.signal(signal.SIGTERM)
        with pytest.raises(httpx2.TransportError):
            list(lines)

    assert engine.process.wait(5) == 0


def test_it_refuses_what_it_does_not_know() -> None:
    command = [sys.executable, "-m", "backhaul_simulator", "--no-connector", "--temperature", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "unrecognized arguments: --temperature" in done.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--side-channel", "5600"], "--side-channel takes HOST:PORT"),
        (["--block-size", "0"], "block_size must be at least 1"),
        (["--ranks", "0"], "--ranks must be at least 1"),
    ],
)
def test_it_says_what_is_wrong_with_an_option(flags: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "backhaul_simulator", "--no-connector", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_each_fault_happens_to_the_requests_that_are_meant(http: httpx2.Client) -> None:
    _script(
        http,
        {"fault": "bare_500"},
        {"fault": "refuse", "status": 429, "message": "not now", "path": CHAT},
        {"fault": "finish_error"},
        {"fault": "delay", "seconds": 0.2},
    )

    failed = http.post(COMPLETIONS, json=PROMPT)
    ended = http.post(COMPLETIONS, json=PROMPT)
    began = time.monotonic()
    late = http.post(COMPLETIONS, json=PROMPT)
    took_s = time.monotonic() - began
    refused = http.post(CHAT, json={"messages": []})

    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "Internal server error")
    assert (ended.status_code, ended.json()["choices"][0]["finish_reason"]) == (200, "error")
    assert (late.status_code, took_s >= 0.2) == (200, True)
    assert (refused.status_code, refused.json()["error"]["message"]) == (429, "not now")
    assert _left(http) == []


def test_a_hand_off_can_be_kept_back(simulated_engines: Engines) -> None:
    http = simulated_engines.prefill.http
    _script(http, {"fault": "no_params"})
    body = {**PROMPT, "kv_transfer_params": {"do_remote_decode": True}}

    assert http.post(COMPLETIONS, json=body).json()["kv_transfer_params"] is None
    assert http.post(COMPLETIONS, json=body).json()["kv_transfer_params"]


def test_a_request_can_hang_until_its_client_leaves(http: httpx2.Client) -> None:
    _script(http, {"fault": "hang"})
    with pytest.raises(httpx2.ReadTimeout):
        http.post(COMPLETIONS, json=PROMPT, timeout=0.3)
    assert http.post(COMPLETIONS, json=PROMPT).status_code == 200


@pytest.mark.parametrize(("after", "count"), [(0, 0), (2, 2), ("end", 4)])
def test_a_connection_can_be_reset_anywhere(http: httpx2.Client, after: int | str, count: int) -> None:
    _script(http, {"fault": "reset", "after": after})
    events: list[str] = []
    try:
        with http.stream("POST", COMPLETIONS, json={**PROMPT, "stream": True, "ignore_eos": True}) as answer:
            events.extend(line for line in answer.iter_lines() if line)
    except httpx2.TransportError:
        assert after != "end"
    assert len(events) == count
    # The client would still take a connection that is about to be reset.
    time.sleep(0.1)
    assert http.post(COMPLETIONS, json=PROMPT).status_code == 200


def test_a_process_can_die_in_the_middle_of_a_stream(own_engines: Engines) -> None:
    engine = own_engines.decode
    _script(engine.http, {"fault": "die", "after": 1})
    with (
        pytest.raises(httpx2.TransportError),
        engine.http.stream("POST", COMPLETIONS, json={**PROMPT, "stream": True}) as answer,
    ):
        list(answer.iter_lines())
    assert engine.process.wait(5) == -signal.SIGKILL


def test_reads_can_be_slow(simulated_engines: Engines) -> None:
    """A turn's read of its ten blocks takes as long as the script says, and other requests go on meanwhile."""
    http = simulated_engines.decode.http
    fresh = {**PROMPT, "prompt": list(range(2000, 2300)), "ignore_eos": True}
    leg = {**fresh, "kv_transfer_params": {"do_remote_decode": True}}
    params = simulated_engines.prefill.http.post(COMPLETIONS, json=leg).json()["kv_transfer_params"]
    _script(http, {"fault": "slow_reads", "seconds_per_block": 0.2})

    def took_s() -> float:
        began = time.monotonic()
        assert http.post(COMPLETIONS, json={**fresh, "kv_transfer_params": params}).status_code == 200
        return time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(took_s)
        while _left(http):
            time.sleep(0.01)
        assert http.post(COMPLETIONS, json=PROMPT).status_code == 200
        assert not slow.done()
        assert slow.result() > 1.9


def test_metrics_tell_what_the_instruments_saw(simulated_engines: Engines) -> None:
    ledger = simulated_engines.decode.http.get("/simulator/ledger").json()["ranks"][0]
    text = simulated_engines.decode.http.get("/metrics").text
    for name, value in ledger.items():
        if isinstance(value, int) and name != "rank":
            assert f'simulator_{name}{{engine="0"}} {float(value)}' in text


def test_its_help_tells_of_every_option() -> None:
    command = [sys.executable, "-m", "backhaul_simulator", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    source = Path(__file__).parents[2] / "deploy" / "simulator" / "src" / "backhaul_simulator" / "options.py"
    for line in source.read_text().splitlines():
        name, _, kind = line.strip().partition(": ")
        if kind.partition(" ")[0] in ("int", "float") and name.isidentifier():
            assert name.replace("_", "-") in text or name.startswith("side_channel"), name
