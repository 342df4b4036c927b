"""docs/metrics.md says what the services count, all of it and nothing else; and what they count is bounded."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import backhaul_node_agent.instruments
import backhaul_router.instruments
from backhaul_common import metering
from backhaul_common.exposition import meter_provider
from backhaul_common.metering import MOST_NAMES, Counter, Histogram, Kind, Level, Metric
from tests.metrics_page import MODULES, PAGE, metrics_of, prometheus_name, written

SERVICES = Path(__file__).parents[1] / "services"
SOURCES = sorted(path for path in SERVICES.rglob("src/**/*.py") if path.name != "instruments.py")
TEXT = "\n".join(path.read_text() for path in SOURCES)
DECLARED = [(name, metric) for module in MODULES.values() for name, metric in metrics_of(module)]
METRICS = [metric for _, metric in DECLARED]

_MOST_SERIES = 15_000
"""If all of them came, which they do not."""
_NAME = re.compile(r"(backhaul|db)(\.[a-z]+(_[a-z]+)*)+")
_TEXT = re.compile(r"[a-z0-9_:./{}-]*")
_WORDS = {"node", "tenant", "session", "key", "set", "request", "conversation", "prompt", "id", "client", "scope"}
"""What labels must not be about: its values have no end, or say who somebody is."""


def each(metrics: list[Metric]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("metric", metrics, ids=lambda metric: metric.name)


def test_the_page_is_what_the_code_declares() -> None:
    assert written(PAGE.read_text()) == PAGE.read_text(), "python -m tests.metrics_page"


def test_every_name_on_the_page_is_a_metric_of_the_code() -> None:
    named = set(re.findall(r"\b(?:backhaul|db_client)_[a-z_]+", PAGE.read_text()))
    real = {prometheus_name(metric) for metric in METRICS}
    for name in named:
        assert re.sub(r"_(bucket|count|sum)$", "", name) in real, name


@pytest.mark.parametrize(("name", "metric"), DECLARED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_declared_is_counted_somewhere(name: str, metric: Metric) -> None:
    assert re.search(rf"\b{name}\b", TEXT)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SERVICES)))
def test_nothing_is_counted_that_is_not_declared(path: Path) -> None:
    used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert "get_meter" not in used or path == Path(metering.__file__)


@each(METRICS)
def test_names_units_and_buckets_are_as_opentelemetry_wants_them(metric: Metric) -> None:
    assert _NAME.fullmatch(metric.name)
    assert metric.unit in ("s", "By", "1") or re.fullmatch(r"\{[a-z]+\}", metric.unit)
    assert not metric.name.endswith(("total", "seconds", "count", "bytes"))
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert bool(metric.bounds) is (metric.kind is Kind.HISTOGRAM)
    assert metric.description[0].isupper()
    assert not metric.description.endswith(".")


def test_no_two_metrics_share_a_name() -> None:
    names = [prometheus_name(metric) for metric in METRICS]
    assert len(names) == len(set(names))


@each([metric for metric in METRICS if metric.labels])
def test_labels_say_little_and_nothing_about_who_or_what_was_asked(metric: Metric) -> None:
    for label in metric.labels:
        assert _WORDS.isdisjoint(re.split(r"[._]", label.name)), label.name
        assert all(_TEXT.fullmatch(value) and len(value) <= 50 for value in label.values), label.values


@each(METRICS)
def test_the_series_of_a_metric_are_bounded(metric: Metric) -> None:
    series = len(metric.bounds) + 2 if metric.bounds else 1
    for label in metric.labels:
        series *= len(label.values) + 1 if label.values else MOST_NAMES + 1
    assert series <= _MOST_SERIES


def test_the_names_on_the_page_are_those_that_prometheus_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    provider = meter_provider("sample", "sample-1", registry)
    monkeypatch.setattr("opentelemetry.metrics.get_meter", provider.get_meter)
    for metric in METRICS:
        _count(metric)
    names = {name for family in registry.collect() for name in _names(family.name, family.type)}
    provider.shutdown()
    assert names == {prometheus_name(metric) for metric in METRICS} | {"target_info"}


def _count(metric: Metric) -> None:
    texts = [min(label.values, default="model") for label in metric.labels]
    match metric.kind:
        case Kind.COUNTER:
            Counter(metric).add(1, *texts)
        case Kind.LEVEL:
            Level(metric).add(1, *texts)
        case Kind.HISTOGRAM:
            Histogram(metric).record(1, *texts)


def _names(name: str, kind: str) -> Iterator[str]:
    yield f"{name}_total" if kind == "counter" else f"{name}_info" if kind == "info" else name


def constants_of(path: str, *calls: str) -> set[str]:
    """Returns the texts that a file of the agent gives to these calls."""
    tree = ast.parse((SERVICES / "node-agent" / path).read_text())
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(calls)]
    given = [value for call in made for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    return {value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)}


def returned_by(path: str, *functions: str) -> set[str]:
    """Returns the texts that functions of the connector return."""
    tree = ast.parse((SERVICES / "node-agent/connector/src/backhaul_connector" / path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
    assert {function.name for function in found} == set(functions), "renamed"
    returns = [node for function in found for node in ast.walk(function) if isinstance(node, ast.Return)]
    return {
        value.value
        for one in returns
        for value in ast.walk(one)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def reasons(texts: set[str]) -> set[str]:
    return {text.lower() for text in texts if re.fullmatch(r"[A-Z][A-Z_]+", text)}


def test_every_reason_for_which_an_owner_grants_nothing_is_one_that_is_counted() -> None:
    source = "src/backhaul_node_agent"
    refused = constants_of(f"{source}/core/granting.py", "Refusal") | constants_of(f"{source}/agent.py", "Refusal")
    refused |= constants_of(f"{source}/core/life.py", "_refuse", "Step")
    by_claims = reasons(refused) - {"engine_unknown", "not_a_hand_off"}
    assert len(by_claims) >= 10
    assert by_claims <= backhaul_node_agent.instruments.CLAIMS.labels[0].values
    assert by_claims <= backhaul_router.instruments.CLAIMS.labels[0].values
    assert {f"claim:{reason}" for reason in by_claims} <= backhaul_router.instruments.MISS_REASONS


def test_every_reason_for_which_there_is_no_second_chance_is_one_that_is_counted() -> None:
    source = "src/backhaul_node_agent"
    refused = constants_of(f"{source}/harvest.py", "Error") | constants_of(f"{source}/engine_requests.py", "Error")
    by_harvests = reasons(refused) - {"deadline_exceeded"}
    assert len(by_harvests) >= 10
    assert by_harvests <= backhaul_router.instruments.SECOND_CHANCES.labels[0].values
    assert {f"harvest:{reason}" for reason in by_harvests} <= backhaul_router.instruments.MISS_REASONS


def test_every_reason_for_which_a_handle_is_not_used_is_one_that_is_counted() -> None:
    refused = returned_by("prefill.py", "judgement", "_unreadable", "_refusal") | returned_by("handles.py", "refuses")
    words = {text for text in refused if re.fullmatch(r"[a-z_]+", text)} - {"remote_blocks_expiry_time"}
    assert {"too_short", "layout", "identity", "expired"} <= words
    assert {f"refused:{word}" for word in words - {"do_remote_prefill"}} <= backhaul_router.instruments.MISS_REASONS
