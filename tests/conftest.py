"""Fixtures for all tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.engine_fixtures import (  # noqa: F401 - fixtures
    engine_python,
    engines,
    pair,
    real_engines,
    simulated_engines,
    tiny_model,
)
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.leaks import no_tasks_left
from tests.fakes.readings import Readings, readings

# How long an example takes says more of the machine than of the code. (Where CI is set hypothesis knows that itself.)
settings.register_profile("tests", deadline=None)
if settings.get_current_profile_name() == "default":
    settings.load_profile("tests")


_ENGINE_TIMEOUT_S = 180
"""A test may be the one that starts real engines: half a minute each on an idle machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests of real engines their time, unless they say themselves what they need."""
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_ENGINE_TIMEOUT_S))


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One etcd for all tests that leave it running; each test uses a cluster name of its own."""
    with EtcdProcess(tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd that the test may kill, freeze, compact or restore."""
    with EtcdProcess(tmp_path) as process:
        yield process


@pytest.fixture(scope="session")
def _span_exporter() -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    """Reads the metrics of instruments that are made during the test."""
    with readings(monkeypatch) as read:
        yield read


@pytest.fixture
def spans(_span_exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    """Collects the spans that end during the test (`spans.get_finished_spans()`)."""
    _span_exporter.clear()
    yield _span_exporter
    _span_exporter.clear()


@pytest.fixture
async def no_leaks() -> AsyncIterator[None]:
    """Fails the test when it leaves tasks behind. Ask for it before other async fixtures, so that it looks last."""
    async with no_tasks_left():
        yield
