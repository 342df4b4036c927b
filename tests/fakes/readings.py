"""Metrics as they are read, by their names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from backhaul_common.metering import Metric

Points = dict[tuple[str, ...], float]


class Readings:
    """Reads the metrics of instruments that were made while it was open."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        self._reader = reader

    def of(self, metric: Metric) -> Points:
        """Returns a metric's values, or how often a histogram was told one, by its labels' values in their order."""
        names = [label.name for label in metric.labels]
        points = self.points(metric.name)
        return {tuple(str((p.attributes or {})[name]) for name in names): _value(p) for p in points}

    def counted(self, metric: Metric) -> Points:
        """Returns the same without what is 0."""
        return {labels: value for labels, value in self.of(metric).items() if value}

    def points(self, name: str) -> list[Any]:
        """Returns the points of a metric; none if nothing was counted."""
        data = self._reader.get_metrics_data()
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
        return [
            point for scope in scopes for one in scope.metrics if one.name == name for point in one.data.data_points
        ]


@contextmanager
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    """Has instruments that are made inside counted."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    yield Readings(reader)
    provider.shutdown()


def _value(point: Any) -> float:
    return float(point.value if hasattr(point, "value") else point.count)
