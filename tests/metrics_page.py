"""The tables of docs/metrics.md, from what the services declare: `python -m tests.metrics_page` writes them anew."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import backhaul_common.instruments
import backhaul_node_agent.instruments
import backhaul_registry.instruments
import backhaul_router.instruments
from backhaul_common.metering import Kind, Label, Metric

PAGE = Path(__file__).parents[1] / "docs/metrics.md"

MODULES: Mapping[str, ModuleType] = {
    "router": backhaul_router.instruments,
    "agent": backhaul_node_agent.instruments,
    "registry": backhaul_registry.instruments,
    "all": backhaul_common.instruments,
}

_FEW = 8
"""Values of a label that fit into its cell."""
_UNITS = {"s": "_seconds", "By": "_bytes"}
_TABLE = "<!-- {}: from the code -->\n{}<!-- end -->"


def metrics_of(module: ModuleType) -> list[tuple[str, Metric]]:
    """Returns what a module declares, by the names that it has in the code."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Metric)]


def prometheus_name(metric: Metric) -> str:
    """Returns a metric's name as Prometheus has it."""
    total = "_total" if metric.kind is Kind.COUNTER else ""
    return metric.name.replace(".", "_") + _UNITS.get(metric.unit, "") + total


def table(metrics: Sequence[Metric]) -> str:
    """Returns one service's table, and what labels say that say much."""
    rows = (f"| {' | '.join(_cells(metric))} |\n" for metric in metrics)
    head = "| Prometheus | OpenTelemetry, unit | kind | labels | what |\n|---|---|---|---|---|\n"
    return head + "".join(rows) + "".join(_long_labels(metrics))


def written(page: str) -> str:
    """Returns the page with tables as they must be."""
    for name, module in MODULES.items():
        metrics = [metric for _, metric in metrics_of(module)]
        between = re.compile(_TABLE.format(re.escape(name), "(?s:.*?)"))
        found = _TABLE.format(name, table(metrics))
        page = between.sub(found.replace("\\", r"\\"), page)
    return page


def _cells(metric: Metric) -> Iterator[str]:
    yield f"`{prometheus_name(metric)}`"
    yield f"`{metric.name}`, `{metric.unit}`"
    yield metric.kind.value
    yield ", ".join(map(_label, metric.labels))
    yield metric.description


def _label(label: Label) -> str:
    name = f"`{label.name.replace('.', '_')}`"
    if not label.values:
        return f"{name}: {label.what}"
    if len(label.values) > _FEW:
        return f"{name}: below"
    return f"{name}: {_values(label)}"


def _values(label: Label) -> str:
    return ", ".join(f"`{value}`" for value in sorted(filter(None, label.values)))


def _long_labels(metrics: Sequence[Metric]) -> Iterator[str]:
    for metric in metrics:
        for label in metric.labels:
            if len(label.values) > _FEW:
                yield f"\n`{label.name}` of `{prometheus_name(metric)}`: {_values(label)}.\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    sys.exit(0)
