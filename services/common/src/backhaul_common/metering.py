"""Metrics: each is declared once, with all that its labels may say, and can say nothing else.

What peers or clients choose never becomes a label: whatever is not in a label's list is counted as `OTHER`. So the
number of series is bounded by the declarations.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product

from opentelemetry import metrics

OTHER = "_OTHER"
"""What is not in a list, as OpenTelemetry's conventions call it."""

MOST_NAMES = 100
"""Names that one label may have where the operator gives them; what comes later is `OTHER`."""

MOST_FROM_THE_START = 20
"""Series that a counter shows as 0 before anything was counted: in one that begins with 1 nobody sees an increase."""

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds for what takes milliseconds, seconds."""
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Bounds for what engines take, seconds."""

Values = Mapping[tuple[str, ...], float]
"""A value for each of some labels' values, in the order of the labels; without labels one, under `()`."""


class Kind(Enum):
    """What is done with the numbers."""

    COUNTER = "counter"
    """They are added up, and never fall."""
    LEVEL = "gauge"
    """One that rises and falls."""
    HISTOGRAM = "histogram"
    """They are counted by how large they are."""


@dataclass(frozen=True, slots=True)
class Label:
    """What tells the series of a metric apart."""

    name: str
    values: frozenset[str]
    """All that it may say; empty: names that the operator gives."""
    what: str = ""
    """Of whom the names are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric of a service."""

    name: str
    """As OpenTelemetry has it: dots, no unit."""
    kind: Kind
    unit: str
    """In UCUM: `s`, `By`, `1`, or what is counted in braces."""
    description: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in its unit."""


def one_of(name: str, values: Iterable[str]) -> Label:
    """Returns a label that says nothing but these."""
    return Label(name, frozenset(values))


class Counter:
    """Adds up."""

    def __init__(self, metric: Metric) -> None:
        self._labels = _Attributes(metric)
        self._counter = _meter().create_counter(metric.name, metric.unit, metric.description)
        for texts in _series(metric):
            self.add(0, *texts)

    def add(self, amount: float, *labels: str) -> None:
        """Counts; one text for each label, in their order."""
        self._counter.add(amount, self._labels.of(labels))


class Level:
    """Rises and falls."""

    def __init__(self, metric: Metric) -> None:
        self._labels = _Attributes(metric)
        self._level = _meter().create_up_down_counter(metric.name, metric.unit, metric.description)

    def add(self, amount: float, *labels: str) -> None:
        """Counts up, or down; one text for each label, in their order."""
        self._level.add(amount, self._labels.of(labels))


class Histogram:
    """Counts by size."""

    def __init__(self, metric: Metric) -> None:
        self._labels = _Attributes(metric)
        self._histogram = _meter().create_histogram(
            metric.name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=metric.bounds
        )

    def record(self, amount: float, *labels: str) -> None:
        """Counts one amount; one text for each label, in their order."""
        self._histogram.record(amount, self._labels.of(labels))


def observe(metric: Metric, read: Callable[[], Values]) -> None:
    """Has a level or a counter read whenever metrics are, in the thread that reads them."""
    labels = _Attributes(metric)
    nothing = dict.fromkeys(_series(metric), 0.0) if metric.kind is Kind.COUNTER else {}

    def observations(_: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        return (metrics.Observation(value, labels.of(values)) for values, value in {**nothing, **read()}.items())

    meter = _meter()
    create = meter.create_observable_gauge if metric.kind is Kind.LEVEL else meter.create_observable_counter
    create(metric.name, [observations], metric.unit, metric.description)


def _series(metric: Metric) -> Iterable[tuple[str, ...]]:
    """Returns the labels' values of all series of a metric; none where they are many, or nobody knows them yet."""
    values = [sorted(label.values) for label in metric.labels]
    return product(*values) if math.prod(map(len, values)) <= MOST_FROM_THE_START else ()


class _Attributes:
    """The attributes of one metric's series, each made once."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._made: dict[tuple[str, ...], dict[str, str]] = {}
        self._names: dict[str, set[str]] = {label.name: set() for label in metric.labels if not label.values}

    def of(self, texts: tuple[str, ...]) -> dict[str, str]:
        made = self._made.get(texts)
        if made is None:
            labels = self._metric.labels
            bounded = tuple(self._bounded(label, text) for label, text in zip(labels, texts, strict=True))
            made = self._made.setdefault(
                bounded, {label.name: text for label, text in zip(labels, bounded, strict=True)}
            )
        return made

    def _bounded(self, label: Label, text: str) -> str:
        if label.values:
            return text if text in label.values else OTHER
        names = self._names[label.name]
        if len(names) < MOST_NAMES:
            names.add(text)
        return text if text in names else OTHER


def _meter() -> metrics.Meter:
    return metrics.get_meter("backhaul")
