"""Metrics say what was declared, and nothing that peers or clients choose."""

import gc
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backhaul_common.metering import (
    MOST_FROM_THE_START,
    MOST_NAMES,
    OTHER,
    Counter,
    Histogram,
    Kind,
    Label,
    Level,
    Metric,
    Values,
    observe,
    one_of,
)
from tests.fakes.readings import Readings

ROUTE = one_of("route", ("cold", "warm"))
MODEL = Label("model", frozenset(), "models")


def metric(*labels: Label, **fields: Any) -> Metric:
    given = {"name": "some.thing", "kind": Kind.COUNTER, "unit": "{thing}", "description": "Things", **fields}
    return Metric(labels=labels, **given)


def test_counts_add_up_by_what_the_labels_say(read: Readings) -> None:
    counted = metric(ROUTE, one_of("result", ("ok", "failed")))
    counter = Counter(counted)
    for labels in (("cold", "ok"), ("cold", "ok"), ("warm", "failed")):
        counter.add(1, *labels)
    assert read.counted(counted) == {("cold", "ok"): 2, ("warm", "failed"): 1}


def counted_before(counted: Metric, read: Readings) -> list[tuple[dict[str, Any], float]]:
    return [(dict(point.attributes), point.value) for point in read.points(counted.name)]


def test_a_counter_says_0_until_it_counts_as_prometheus_sees_no_increase_from_nothing_to_1(read: Readings) -> None:
    counter = Counter(plain := metric())
    Counter(labelled := metric(ROUTE, name="some.labelled"))
    observe(observed := metric(ROUTE, name="some.observed"), dict)
    assert counted_before(plain, read) == [({}, 0)]
    for one in (labelled, observed):
        assert counted_before(one, read) == [({"route": "cold"}, 0), ({"route": "warm"}, 0)]
    counter.add(1)
    assert counted_before(plain, read) == [({}, 1)]


@pytest.mark.parametrize("labels", [(ROUTE, MODEL), (one_of("reason", map(str, range(MOST_FROM_THE_START + 1))),)])
def test_a_counter_of_many_series_or_unknown_ones_says_nothing_until_it_counts(
    read: Readings, labels: tuple[Label, ...]
) -> None:
    Counter(many := metric(*labels))
    assert read.points(many.name) == []


def test_levels_rise_and_fall(read: Readings) -> None:
    level = Level(metric())
    level.add(3)
    level.add(-2)
    assert read.of(metric()) == {(): 1}


def test_a_histogram_has_the_buckets_that_were_declared(read: Readings) -> None:
    Histogram(metric(kind=Kind.HISTOGRAM, bounds=(0.1, 2.0))).record(0.5)
    [point] = read.points("some.thing")
    assert (point.explicit_bounds, point.bucket_counts) == ((0.1, 2.0), (0, 1, 0))


@pytest.mark.parametrize("kind", [Kind.LEVEL, Kind.COUNTER], ids=lambda kind: kind.value)
def test_what_is_observed_is_read_anew_each_time(read: Readings, kind: Kind) -> None:
    now: dict[tuple[str, ...], float] = {("cold",): 1}
    observed = metric(ROUTE, kind=kind)

    def values() -> Values:
        return now

    observe(observed, values)
    assert read.counted(observed) == {("cold",): 1}
    now[("warm",)] = 5
    now[("chosen by a peer",)] = 7
    assert read.of(observed) == {("cold",): 1, ("warm",): 5, (OTHER,): 7}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(texts=st.lists(st.text(max_size=20), max_size=20))
def test_whatever_is_said_no_label_says_more_than_was_declared(read: Readings, texts: list[str]) -> None:
    counted = metric(ROUTE, name="some.other")
    counter = Counter(counted)
    for text in texts:
        counter.add(1, text)
    assert set(read.of(counted)) <= {("cold",), ("warm",), (OTHER,)}


def test_names_that_the_operator_gives_are_bounded(read: Readings) -> None:
    counted = metric(MODEL)
    counter = Counter(counted)
    for number in range(MOST_NAMES + 50):
        counter.add(1, f"model-{number}")
    counter.add(1, "model-0")
    points = read.of(counted)
    assert len(points) == MOST_NAMES + 1
    assert (points[("model-0",)], points[(OTHER,)]) == (2, 50)


def test_what_is_refused_as_a_label_is_not_remembered(read: Readings) -> None:
    counter = Counter(metric(ROUTE))
    counter.add(1, "first")
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(5000):
        counter.add(1, f"of a peer: {number}")
    gc.collect()
    assert sys.getallocatedblocks() - before < 1000


@pytest.mark.parametrize("labels", [(), ("cold", "ok")], ids=["too few", "too many"])
def test_a_label_that_is_missing_or_too_many_is_a_fault(read: Readings, labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="zip"):
        Counter(metric(ROUTE)).add(1, *labels)
