"""What every service's process does about signals and telemetry, in processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest

SERVICE = """
import asyncio, sys, time
from opentelemetry import trace
from backhaul_common.errors import UnavailableError
from backhaul_common.logs import configure_logging
from backhaul_common.run import run_service
from backhaul_common.telemetry import configure_telemetry
async def main(stopping):
    with trace.get_tracer("t").start_as_current_span("s") as span:
        print("recording" if span.is_recording() else "not recording", flush=True)
    began = time.monotonic()
    for _ in range(2_000): trace.get_tracer("t").start_span("request").end()
    print(f"took {time.monotonic() - began}", flush=True)
    await stopping.wait()
    if "fail" in sys.argv: raise UnavailableError("SOME_REASON", "some words")
    if "crash" in sys.argv: raise RuntimeError("boom")
    if "linger" in sys.argv: await asyncio.sleep(60)
configure_logging("info", "sample")
with configure_telemetry("sample"):
    code = run_service(main)
sys.exit(code)
"""


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def end(process: "subprocess.Popen[str]", *signals: signal.Signals) -> tuple[int, str, str, float]:
    """Sends the signals and returns exit code, first line, errors and seconds taken."""
    assert process.stdout is not None
    first = process.stdout.readline().strip()
    started = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)
    try:
        _, errors = process.communicate(timeout=15)
    finally:
        process.kill()
    return process.returncode, first, errors, time.monotonic() - started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_service_well_and_telemetry_is_off_by_default(number: signal.Signals) -> None:
    code, first, errors, _ = end(start(), number)
    assert (code, first) == (0, "not recording")
    assert "Traceback" not in errors


def test_signals_have_more_and_less_logged() -> None:
    code, _, errors, _ = end(start(), signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM)
    lines = map(json.loads, errors.splitlines())
    assert [line["to"] for line in lines if line["event"] == "log level changed"] == ["debug", "info", "warning"]
    assert code == 0


def test_a_second_signal_ends_it_at_once() -> None:
    code, _, _, took_s = end(start("linger"), signal.SIGTERM, signal.SIGTERM)
    assert (code, took_s < 5) == (128 + signal.SIGTERM, True)


@pytest.mark.parametrize(("how", "word"), [("fail", "SOME_REASON"), ("crash", "boom")])
def test_an_error_is_logged_and_ends_it_with_code_1(how: str, word: str) -> None:
    code, _, errors, _ = end(start(how), signal.SIGTERM)
    assert code == 1
    assert word in errors


def test_a_collector_that_is_away_or_silent_delays_the_end_by_two_seconds_at_most() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        for port in (silent.getsockname()[1], 9):
            endpoint = f"http://127.0.0.1:{port}"
            code, first, _, took_s = end(start(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint), signal.SIGTERM)
            assert (code, first) == (0, "recording")
            # One export that waits for its answer takes ten seconds.
            assert took_s < 8


def test_a_collector_that_is_away_or_silent_delays_no_request() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        for port in (silent.getsockname()[1], 9):
            process = start(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
            assert process.stdout is not None
            try:
                process.stdout.readline()
                # Two thousand spans; one export that waits for its answer takes ten seconds.
                assert float(process.stdout.readline().removeprefix("took ")) < 3
            finally:
                process.kill()
                process.communicate()


def test_a_protocol_that_is_not_spoken_is_warned_of() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    _, first, errors, _ = end(start(**environment), signal.SIGTERM)
    assert first == "recording"
    assert "OTLP protocol not supported" in errors


@pytest.mark.parametrize("name", ["OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"])
def test_telemetry_can_be_switched_off(name: str) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", name: "true" if "SDK" in name else "none"}
    _, first, _, _ = end(start(**environment), signal.SIGTERM)
    assert first == "not recording"
