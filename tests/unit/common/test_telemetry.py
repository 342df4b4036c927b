"""How long a service that ends waits for a collector that does not answer."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider

from backhaul_common import telemetry

DOCUMENTED_S = 2.0
"""In which a service ends whatever its collector does (docs/tracing.md)."""


def test_it_ends_within_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float | None] = []

    class Hanging(threading.Thread):
        def __init__(self, *, target: Callable[[], None], daemon: bool) -> None:
            super().__init__(target=lambda: None, daemon=daemon)
            assert daemon, "it would keep the process from ending"

        def join(self, timeout: float | None = None) -> None:
            waited.append(timeout)

        def is_alive(self) -> bool:
            return True

    monkeypatch.setattr("backhaul_common.telemetry.threading", SimpleNamespace(Thread=Hanging))
    telemetry._shut_down(TracerProvider(shutdown_on_exit=False))
    (timeout,) = waited
    assert timeout is not None
    assert timeout < DOCUMENTED_S
