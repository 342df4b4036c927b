"""Dashboards and alerts name what the code counts, say what they show, and have an entry in the runbook each."""

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest

from backhaul_common.metering import Kind, Metric
from tests.dashboards import (
    ALERTS,
    DASHBOARDS,
    FOLDER,
    PAGE,
    ROOT,
    Panel,
    dashboard,
    grouped_by,
    panels,
    rules,
    selectors,
    written,
)
from tests.fakes.prometheus import promtool
from tests.metrics_page import MODULES, metrics_of, prometheus_name

METRICS = {prometheus_name(metric): metric for module in MODULES.values() for _, metric in metrics_of(module)}
PANELS = [pytest.param(panel, id=f"{name}-{panel.title}") for name in DASHBOARDS for panel in panels(name)]
RULES = [pytest.param(rule, id=rule["alert"]) for rule in rules()]
EXPRS = [
    *(
        pytest.param(query.expr, id=f"{name}-{panel.title}")
        for name in DASHBOARDS
        for panel in panels(name)
        for query in panel.queries
    ),
    *(pytest.param(rule["expr"], id=rule["alert"]) for rule in rules()),
]

RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()

CODE = "\n".join(path.read_text() for path in sorted((ROOT / "services").rglob("src/**/*.py")))

OF_PROMETHEUS = {"job", "instance", "le"}
"""Labels that come with any target or histogram."""
OTHERS: Mapping[str, set[str]] = {
    # prometheus_client's ProcessCollector, OpenTelemetry's exporter, Prometheus itself.
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "process_start_time_seconds": set(),
    "process_open_fds": set(),
    "process_max_fds": set(),
    "target_info": {"service_name", "service_instance_id"},
    "up": set(),
    "ALERTS": {"alertname", "alertstate", "severity"},
    # vLLM 0.32: v1/metrics/loggers.py, and distributed/kv_transfer/kv_connector/v1/nixl/stats.py.
    "vllm:num_requests_running": {"engine"},
    "vllm:num_requests_waiting": {"engine"},
    "vllm:kv_cache_usage_perc": {"engine"},
    "vllm:num_preemptions_total": {"engine"},
    "vllm:prompt_tokens_by_source_total": {"engine", "source"},
    "vllm:nixl_num_failed_transfers_total": {"engine"},
    "vllm:nixl_num_failed_notifications_total": {"engine"},
    "vllm:nixl_num_kv_expired_reqs_total": {"engine"},
    "vllm:nixl_num_notifications_after_expiry_total": {"engine"},
    "vllm:nixl_xfer_time_seconds": {"engine"},
}
"""Metrics of others, with their labels."""
KINDS = {"timeseries", "stat", "state-timeline"}


def labels_of(name: str) -> set[str]:
    if name in OTHERS:
        return OTHERS[name]
    return {label.name.replace(".", "_") for label in METRICS[name].labels}


@pytest.mark.parametrize("expr", EXPRS)
def test_every_metric_and_label_that_a_query_names_is_counted_by_the_code(expr: str) -> None:
    named = selectors(expr)
    assert named
    for selector in named:
        assert selector.metric in METRICS or selector.metric in OTHERS, selector.metric
        known = labels_of(selector.metric) | OF_PROMETHEUS
        assert {label for label, _, _ in selector.matchers} <= known, selector
    everything = set().union(*(labels_of(selector.metric) for selector in named)) | OF_PROMETHEUS
    assert grouped_by(expr) <= everything | {"service_instance_id"}


@pytest.mark.parametrize("expr", EXPRS)
def test_every_value_that_a_query_asks_for_is_one_that_its_label_may_have(expr: str) -> None:
    for selector in selectors(expr):
        if selector.metric in METRICS:
            for label, operator, value in selector.matchers:
                _check_values(METRICS[selector.metric], label, value.split("|") if "~" in operator else [value])


def _check_values(metric: Metric, label: str, patterns: list[str]) -> None:
    declared = next((one.values for one in metric.labels if one.name.replace(".", "_") == label), frozenset())
    for pattern in patterns if declared else ():
        assert any(re.fullmatch(pattern, value) for value in {*declared, ""}), (
            f"{metric.name}: {label} is never {pattern}"
        )


@pytest.mark.parametrize("expr", EXPRS)
def test_only_what_grows_has_a_rate_and_all_that_grows_has_one(expr: str) -> None:
    for name in re.findall(r"\b(?:rate|increase)\(([\w:]+)", expr):
        assert name.endswith(("_total", "_bucket", "_count")), name
    for selector in selectors(
        re.sub(r"\b(?:rate|increase) ?\([\w:]+(?:\{[^}]*\})?\[[^]]+\](?: offset \w+)?\)", "", expr)
    ):
        assert selector.metric not in METRICS or METRICS[selector.metric].kind is Kind.LEVEL, selector.metric


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_says_what_it_shows_in_which_unit_and_by_which_names(panel: Panel) -> None:
    assert panel.model["type"] in KINDS
    assert panel.unit
    assert len(panel.model["description"]) > 15
    assert panel.model["description"].endswith(".")
    for query in panel.queries:
        assert query.legend
        labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        assert labels <= grouped_by(query.expr) | OF_PROMETHEUS | set().union(
            *(labels_of(one.metric) for one in selectors(query.expr))
        )


@pytest.mark.parametrize("panel", PANELS)
def test_every_query_goes_to_the_datasource_and_the_jobs_that_were_chosen(panel: Panel) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert all(one["datasource"] == chosen for one in (panel.model, *panel.model["targets"]))
    for query in panel.queries:
        for selector in selectors(query.expr):
            job = "$engines" if selector.metric.startswith("vllm:") else "$job"
            assert selector.metric == "ALERTS" or ("job", "=~", job) in selector.matchers, selector


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_can_be_imported_beside_the_other(name: str) -> None:
    model = dashboard(name)
    assert model["uid"] == f"backhaul-{name}"
    assert "id" not in model
    assert model["schemaVersion"] >= 39
    ids = [panel["id"] for panel in model["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in model["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", " ".join(str(panel) for panel in model["panels"])))
    assert used == variables


@pytest.mark.parametrize("name", DASHBOARDS)
def test_no_two_panels_are_in_the_same_place(name: str) -> None:
    places = [panel["gridPos"] for panel in dashboard(name)["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above


def test_the_page_says_of_each_panel_what_the_dashboard_says() -> None:
    assert written(PAGE.read_text()) == PAGE.read_text(), "python -m tests.dashboards"


@pytest.mark.parametrize("rule", RULES)
def test_every_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on(rule: Mapping[str, Any]) -> None:
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["description"].endswith(".")
    assert not rule["annotations"]["summary"].endswith(".")
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_every_alert_has_an_entry_in_the_runbook_and_every_entry_an_alert() -> None:
    assert re.findall(r"^### (.+)$", RUNBOOK, re.MULTILINE) == [rule["alert"] for rule in rules()]


@pytest.mark.parametrize("rule", RULES)
def test_every_entry_says_what_it_means_how_to_see_why_and_what_to_do(rule: Mapping[str, Any]) -> None:
    (entry,) = re.findall(rf"^### {rule['alert']}$(.*?)(?=^##|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    for part in (f"({rule['labels']['severity']})", "**Means.**", "**Why.**", "**Do.**"):
        assert part in entry


def test_every_event_that_the_runbook_names_is_logged() -> None:
    named = [
        event
        for events in re.findall(r"[Ll]og:\s+((?:`[^`]+`(?:,\s+)?)+)", RUNBOOK)
        for event in re.findall(r"`([^`]+)`", events)
    ]
    assert len(named) > 30
    assert {event for event in named if f'"{event}"' not in CODE} == set()


def test_every_panel_that_the_runbook_names_is_there() -> None:
    titles = {panel.title for name in DASHBOARDS for panel in panels(name)}
    named = set(re.findall(r"(?<![*\w])\*([A-Z][^*\n]+)\*(?![*\w])", RUNBOOK)) - {
        dashboard(name)["title"] for name in DASHBOARDS
    }
    assert named - titles == set()


def test_prometheus_takes_the_rules_and_the_example_of_its_configuration() -> None:
    for kind, file in (("rules", ALERTS), ("config", FOLDER / "prometheus.yaml")):
        result = promtool("check", kind, file)
        assert result.returncode == 0, result.stdout + result.stderr
