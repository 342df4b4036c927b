"""The endpoint where Prometheus reads: what it shows, over what, and to whom."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from opentelemetry import metrics
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from backhaul_common import exposition
from backhaul_common.errors import UnavailableError
from backhaul_common.exposition import MetricsEndpoint, configure_metrics, meter_provider
from backhaul_common.metering import Counter, Histogram, Kind, Metric, one_of
from backhaul_common.tls import CallerContext, Identity
from backhaul_local.certificates import Authority
from tests.fakes.certificates import identity

THINGS = Metric(
    name="backhaul.some.things",
    kind=Kind.COUNTER,
    unit="{thing}",
    description="Things",
    labels=(one_of("kind", ("good", "bad")),),
)
TIMES = Metric(name="backhaul.some.time", kind=Kind.HISTOGRAM, unit="s", description="Times", bounds=(0.1, 1.0))


@asynccontextmanager
async def endpoint(registry: CollectorRegistry, tls: Identity | None = None) -> AsyncIterator[str]:
    async with MetricsEndpoint("127.0.0.1:0", registry, tls=tls) as served:
        yield f"{'https' if tls else 'http'}://localhost:{served.port}/metrics"


async def get(url: str, caller: Identity | None = None, **headers: str) -> tuple[int, str, str]:
    ssl = CallerContext(caller).current() if caller else True
    timeout = aiohttp.ClientTimeout(10)
    async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url, ssl=ssl, headers=headers) as answer:
        return answer.status, answer.headers["content-type"], await answer.text()


async def test_what_was_counted_is_read_under_prometheus_names(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    provider = meter_provider("backhaul-router", "router-1", registry)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    Counter(THINGS).add(2, "good")
    Histogram(TIMES).record(0.5)
    async with endpoint(registry) as url:
        status, content_type, text = await get(url)
    provider.shutdown()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = [(one.name, one.labels, one.value) for family in families.values() for one in family.samples]
    assert (status, content_type.partition(";")[0]) == (200, "text/plain")
    assert ("backhaul_some_things_total", {"kind": "good"}, 2.0) in samples
    assert ("backhaul_some_time_seconds_bucket", {"le": "1.0"}, 1.0) in samples
    assert ("backhaul_some_time_seconds_bucket", {"le": "0.1"}, 0.0) in samples
    [(_, target, _)] = [one for one in samples if one[0] == "target_info"]
    assert (target["service_name"], target["service_instance_id"]) == ("backhaul-router", "router-1")
    assert families["backhaul_some_things"].documentation == "Things"


async def test_openmetrics_is_there_for_who_asks_for_it(no_leaks: None) -> None:
    async with endpoint(CollectorRegistry()) as url:
        status, content_type, text = await get(url, accept="application/openmetrics-text; version=1.0.0")
    assert (status, content_type.partition(";")[0], text) == (200, "application/openmetrics-text", "# EOF\n")


async def test_there_is_nothing_else_on_it(no_leaks: None) -> None:
    async with endpoint(CollectorRegistry()) as url:
        assert (await get(url.removesuffix("/metrics")))[0] == 404
        assert (await get(url.removesuffix("/metrics") + "/v1/models"))[0] == 404


async def test_who_opens_many_connections_keeps_no_scraper_out(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "MAX_CONNECTIONS", 3)
    async with endpoint(CollectorRegistry()) as url:
        port = int(url.split(":")[2].partition("/")[0])
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        assert (await get(url))[0] == 200
        for reader, _ in opened[:5]:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, writer in opened:
            writer.close()


async def test_over_tls_whoever_has_a_certificate_of_the_services_reads_and_nobody_else(
    no_leaks: None, tmp_path: Path
) -> None:
    ours, theirs = (Authority(tmp_path / name) for name in ("ours", "theirs"))
    service = identity(ours.issue("router"), ours)
    async with endpoint(CollectorRegistry(), service) as url:
        status, _, _ = await get(url, identity(ours.issue("prometheus"), ours))
        assert status == 200
        for caller in (identity(None, ours), identity(theirs.issue("prometheus"), ours)):
            with pytest.raises(aiohttp.ClientError):
                await get(url, caller)
        with pytest.raises(aiohttp.ClientError):
            await get(url.replace("https:", "http:"))


async def test_an_address_that_is_taken_is_named(no_leaks: None) -> None:
    async with endpoint(CollectorRegistry()) as url:
        address = url.removeprefix("http://").removesuffix("/metrics").replace("localhost", "127.0.0.1")
        with pytest.raises(UnavailableError, match=address):
            async with MetricsEndpoint(address, CollectorRegistry()):
                pass


def test_nothing_is_counted_where_nobody_reads() -> None:
    before = metrics.get_meter_provider()
    with configure_metrics("backhaul-router", "router-1", wanted=False) as measured:
        assert measured is None
        assert metrics.get_meter_provider() is before
