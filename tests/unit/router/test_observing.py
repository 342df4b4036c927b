"""What is counted."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from structlog.testing import capture_logs

from backhaul_common.errors import DeadlineExceededError, NotFoundError, UnavailableError
from backhaul_common.metering import OTHER
from backhaul_router import instruments
from backhaul_router.core.engines import Failure
from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.core.turn import Route
from backhaul_router.observing import observe_nodes
from tests.fakes.clock import FakeClock
from tests.fakes.readings import Readings
from tests.unit.router.ports import Bench, FakeStream, ready
from tests.unit.router.test_admission import admission, refusal, running
from tests.unit.router.test_forwarding import log
from tests.unit.router.test_second_chances import cached_bench


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    yield reader
    provider.shutdown()


def counted(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Returns the points of each metric: attributes (sorted) to value or count."""
    data = reader.get_metrics_data()
    found: dict[str, Any] = {}
    for resource in data.resource_metrics if data else ():
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            points = {tuple(sorted((p.attributes or {}).items())): _number(p) for p in metric.data.data_points}
            found[metric.name.removeprefix("backhaul.router.")] = points
    return found


def nonzero(points: Mapping[Any, float]) -> dict[Any, float]:
    """Returns those that were counted at least once."""
    return {labels: value for labels, value in points.items() if value}


def ended(route: str) -> Sequence[Any]:
    """Returns the attributes of turns that went well."""
    return (("model", "m"), ("result", "ok"), ("route", route))


def points(reader: InMemoryMetricReader, name: str) -> Sequence[Any]:
    """Returns the points of one metric."""
    data = reader.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
    [metric] = [one for scope in scopes for one in scope.metrics if one.name == f"backhaul.router.{name}"]
    return metric.data.data_points


def _number(point: Any) -> int:
    return int(point.value if hasattr(point, "value") else point.count)


async def test_routes_misses_tokens_and_times(reader: InMemoryMetricReader) -> None:
    bench = Bench()
    bench.publish("a")
    await bench.chat("a")
    await bench.chat("a", "b", "c")
    bench.engines.prefill_steps = [Failure.UNAVAILABLE, Failure.UNAVAILABLE]
    await bench.chat("a")
    got = counted(reader)
    assert got["turns"] == {ended("cold"): 2, ended("warm"): 1}
    assert got["misses"] == {(("reason", "first_turn"),): 2}
    assert got["prompt_tokens"] == {
        (("source", "read"),): 112,
        (("source", "local"),): 16,
        (("source", "computed"),): 272,
    }
    assert got["fallbacks"] == {(): 1}
    assert got["handoff"] == {(): 2}
    assert got["ttft"] == {(("route", "cold"),): 2, (("route", "warm"),): 1}
    # Nothing was estimated for a turn in which something failed.
    assert got["estimate_error"] == {(("route", "cold"),): 1, (("route", "warm"),): 1}


async def test_a_turn_that_its_holder_serves_alone_has_a_route_of_its_own(reader: InMemoryMetricReader) -> None:
    bench = Bench(prefer=Route.APPEND)
    bench.publish("a")
    await bench.chat("a", "b", "c")
    got = counted(reader)
    assert got["turns"] == {ended("append"): 1}
    assert "misses" not in got
    for name in ("ttft", "estimate_error"):
        assert got[name] == {(("route", "append"),): 1}


async def test_an_estimate_is_held_against_the_time_until_the_first_byte(reader: InMemoryMetricReader) -> None:
    bench = Bench(nodes=ready("d1"))

    async def after_twice_as_long() -> FakeStream:
        bench.clock.now += 2 * bench.live.costs.alone_s(("d1", "d1-engine"), computed=1)
        return FakeStream()

    bench.engines.decode_steps = [after_twice_as_long]
    await bench.chat("a")
    (point,) = points(reader, "estimate_error")
    assert 1.9 < point.sum / point.count < 2.1


async def test_the_first_byte_is_that_of_a_stream(reader: InMemoryMetricReader) -> None:
    bench = Bench()

    async def whole() -> FakeStream:
        bench.clock.now += 0.25
        return FakeStream(b"{}", headers={"content-type": "application/json"})

    bench.engines.decode_steps = [whole]
    with capture_logs() as logs:
        await bench.chat("a", stream=False)
        await bench.chat("a")
    assert [(line["ttft_ms"], line["answer_ms"]) for line in logs if line["event"] == "turn"] == [
        (None, 250),
        (0, None),
    ]
    assert all(line["estimate_ms"] > 0 for line in logs if line["event"] == "turn")
    got = counted(reader)
    assert got["ttft"] == got["estimate_error"] == {(("route", "cold"),): 1}


async def test_nodes_are_counted_by_how_they_are_used(reader: InMemoryMetricReader) -> None:
    bench = Bench()
    observe_nodes(bench.live.breakers, bench.table, lambda: True)
    bench.routing.follow({node.node_id for node in bench.table})
    bench.live.breakers.failed(ready("d1")[0], Failure.REFUSED)
    states = {"closed": 3, "open": 1, "half_open": 0, "starting": 0}
    assert counted(reader)["nodes"] == {(("state", state),): count for state, count in states.items()}


async def test_pairs_that_are_set_apart(reader: InMemoryMetricReader) -> None:
    bench = Bench()
    bench.publish("a")
    bench.engines.prefill_steps = [Failure.FAULT]
    await bench.chat("a", "b", "c")
    assert counted(reader)["pairs_apart"] == {(): 1}


async def test_what_runs_is_held_and_is_refused(reader: InMemoryMetricReader) -> None:
    limits = admission(max_turns=1, max_held_bytes=10)
    async with limits.turn() as held:
        held.grow(7)
        for _ in range(2):
            await refusal(limits)
        with pytest.raises(ApiError):
            held.grow(4)
        running = counted(reader)
        assert (running["running_turns"], running["held_bodies"]) == ({(): 1}, {(): 7})
    got = counted(reader)
    assert (got["running_turns"], got["held_bodies"]) == ({(): 0}, {(): 0})
    assert nonzero(got["refusals"]) == {(("reason", "too_many_turns"),): 2, (("reason", "too_many_bytes"),): 1}


async def test_what_waits_and_what_came_of_it(reader: InMemoryMetricReader) -> None:
    clock = FakeClock()
    limits = admission(max_turns=1, max_queued=3, queue_timeout_s=5, clock=clock, high=TenantLimits(priority=1))
    async with running(limits, "a", "a", "a", "a", "high") as (first, _, gone, _, _):
        assert counted(reader)["queued_turns"] == {(): 3}
        await gone.leave()
        await first.end()
        await clock.advance(6)
        got = counted(reader)
    assert got["queued_turns"] == {(): 0}
    assert got["queue_wait"] == {(("result", result),): 1 for result in ("refused", "left", "running", "late")}
    assert nonzero(got["refusals"]) == {(("reason", "displaced"),): 1, (("reason", "queue_timeout"),): 1}


async def test_what_a_gateway_tells_of_streams_is_counted_as_if_they_had_passed(reader: InMemoryMetricReader) -> None:
    bench = Bench()
    await log(bench, flags=["upstream_connection_termination"])
    got = counted(reader)
    assert got["turns"] == {ended("cold"): 1}
    assert got["ttft"] == got["estimate_error"] == {(("route", "cold"),): 1}
    assert got["broken_off"] == {(): 1}


async def test_claims_are_counted_by_what_came_of_them_and_timed(read: Readings) -> None:
    bench = Bench()
    bench.publish("a")
    await bench.chat("a", "b", "c")
    for error in (
        NotFoundError("SET_UNKNOWN", ""),
        NotFoundError("OF_A_NEWER_AGENT", ""),
        UnavailableError("UNAVAILABLE", ""),
        DeadlineExceededError("LATE", ""),
    ):
        bench.owner.failure = error
        await bench.chat("a", "b", "c")
    counted = {("granted",): 1, ("set_unknown",): 1, (OTHER,): 1, ("owner_unavailable",): 1, ("lookup_timeout",): 1}
    assert read.counted(instruments.CLAIMS) == counted
    assert read.of(instruments.CLAIM_DURATION) == read.of(instruments.LOOKUP_DURATION) == {(): 5}
    assert read.of(instruments.MISSES)[(OTHER,)] == 1


async def test_second_chances_are_counted_by_what_came_of_them(read: Readings) -> None:
    bench = cached_bench()
    await bench.chat("a", "b", "c")
    bench.owner.harvest_failures = [NotFoundError("NOT_CACHED", ""), DeadlineExceededError("LATE", "")]
    await bench.chat("a", "b", "c")
    await bench.chat("a", "b", "c")
    bench.engines.tokens = []
    await bench.chat("a", "b", "c")
    granted = {("granted",): 1, ("not_cached",): 1, ("harvest_timeout",): 1, ("no_tokens",): 1}
    assert read.counted(instruments.SECOND_CHANCES) == granted


async def test_a_model_that_no_node_serves_is_named_nowhere(read: Readings) -> None:
    bench = Bench(nodes=[])
    with pytest.raises(ApiError):
        await bench.chat("a", model="a client's own idea")
    assert read.of(instruments.TURNS) == {("cold", "error_503", OTHER): 1}
    assert read.of(instruments.TURN_DURATION) == {("cold",): 1}


async def test_orphans_and_the_watch_of_the_nodes_are_read(read: Readings) -> None:
    bench, follows = Bench(), [True]
    observe_nodes(bench.live.breakers, bench.table, lambda: follows[0])
    assert (read.of(instruments.ORPHANS), read.of(instruments.REGISTRY_WATCH)) == ({(): 0}, {(): 1})
    bench.table.replace(ready("p1", "d1"))
    follows[0] = False
    assert (read.of(instruments.ORPHANS), read.of(instruments.REGISTRY_WATCH)) == ({(): 2}, {(): 0})


async def test_a_node_that_is_ejected_is_counted_and_named_in_the_log(read: Readings) -> None:
    bench = Bench()
    bench.engines.prefill_steps = [Failure.REFUSED]
    with capture_logs() as logs:
        await bench.chat("a")
        await bench.chat("a")
    ejected = [(line["node_id"], line["failure"]) for line in logs if line["event"] == "node ejected"]
    assert ejected == [("p1", "refused")]
    assert read.counted(instruments.EJECTIONS) == {("refused",): 1}
