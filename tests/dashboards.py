"""The dashboards and alerts of deploy/dashboards, and what their queries name.

`python -m tests.dashboards` writes the tables of docs/dashboards.md anew.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "dashboards"
DASHBOARDS = ("operators", "on-call")
ALERTS = FOLDER / "alerts.yaml"
PAGE = ROOT / "docs" / "dashboards.md"

_SELECTOR = re.compile(r"\b((?:backhaul|db_client|vllm:|process|target_info|up|ALERTS)[a-z_]*)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")
_TABLE = "<!-- {}: from the dashboard -->\n{}<!-- end -->"
_SUFFIX = re.compile(r"_(bucket|count|sum)$")


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric that a query names, with what it wants of its labels."""

    metric: str
    """As it was declared: without `_bucket` and its like."""
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator and value."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a dashboard."""

    title: str
    row: str
    """The title above it."""
    queries: tuple[Query, ...]
    model: Mapping[str, Any]
    """As Grafana has it."""

    @property
    def unit(self) -> str:
        return str(self.model["fieldConfig"]["defaults"]["unit"])


def dashboard(name: str) -> dict[str, Any]:
    """Returns a dashboard as Grafana has it."""
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def panels(name: str) -> Iterator[Panel]:
    """Yields the panels of a dashboard, from the top."""
    row = ""
    for model in dashboard(name)["panels"]:
        if model["type"] == "row":
            row = model["title"]
            continue
        queries = tuple(Query(target["expr"], target["legendFormat"]) for target in model["targets"])
        yield Panel(model["title"], row, queries, model)


def rules() -> list[dict[str, Any]]:
    """Returns all alerts."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def selectors(expr: str) -> list[Selector]:
    """Returns which metrics a query reads."""
    return [
        Selector(_SUFFIX.sub("", name), tuple(_MATCHER.findall(matchers)))
        for name, matchers in _SELECTOR.findall(_GROUPING.sub("", expr))
    ]


def grouped_by(expr: str) -> set[str]:
    """Returns the labels by which a query groups or joins."""
    return {label for labels in _GROUPING.findall(expr) for label in re.split(r"[\s,]+", labels) if label}


def written(page: str) -> str:
    """Returns the page with tables as they must be."""
    for name in DASHBOARDS:
        between = re.compile(_TABLE.format(name, "(?s:.*?)"))
        found = _TABLE.format(name, _table(name))
        page = between.sub(lambda _, found=found: found, page)  # type: ignore[misc]  # mypy takes no defaults in lambdas here
    return page


def _table(name: str) -> str:
    rows: dict[str, list[str]] = {}
    for panel in panels(name):
        rows.setdefault(panel.row, []).append(f"| **{panel.title}** | {panel.model['description']} |\n")
    head = "\n| panel | how to read it |\n|---|---|\n"
    return "\n".join(f"### {row}\n{head}{''.join(lines)}" for row, lines in rows.items())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    sys.exit(0)
