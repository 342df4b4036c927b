"""Every query of dashboards and alerts answers something, of a real Prometheus that reads a running stack."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboards import DASHBOARDS, Panel, panels, rules, selectors
from tests.e2e.dashboards.watched import Watched, watched

pytestmark = pytest.mark.timeout(240)

REAL_ENGINES_ONLY = {
    "vllm:nixl_xfer_time_seconds_bucket",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_failed_notifications_total",
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_notifications_after_expiry_total",
}
"""What NIXL counts in vLLM: simulated engines move blocks without it."""
WITH_TENANTS_ONLY = {"backhaul_router_tenants_reads_total"}
OF_THE_TURN_THAT_FAILED = {"BackhaulTurnsFail", "BackhaulNodeEjected"}
OF_A_SLOW_MACHINE = {"BackhaulFirstByteSlow", "BackhaulEtcdSlow", "BackhaulPublishingSlow", "BackhaulColdByFault"}
PANELS = [(name, panel) for name in DASHBOARDS for panel in panels(name)]


def shown(panel: Panel) -> bool:
    """Tells whether simulated engines have what a panel shows."""
    return not any(name in query.expr for query in panel.queries for name in REAL_ENGINES_ONLY)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The stack, once a turn has failed and others go well."""
    with watched(tmp_path_factory.mktemp("d")) as running:
        running.play()
        running.fail()
        yield running


def test_no_panel_is_empty(running: Watched) -> None:
    empty: dict[tuple[str, str], list[str]] = {}

    def full() -> bool:
        running.play()
        found = {(name, panel.title): running.empty(panel) for name, panel in PANELS if shown(panel)}
        empty.clear()
        empty.update({place: queries for place, queries in found.items() if queries})
        return not empty

    try:
        running.prometheus.eventually(full, "there are empty panels", within_s=120)
    except AssertionError as error:
        raise AssertionError(f"{error}: {empty}") from error


def test_only_what_nixl_counts_is_excluded(running: Watched) -> None:
    hidden = [(name, panel.row) for name, panel in PANELS if not shown(panel)]
    assert set(hidden) == {("on-call", "Real vLLM engines, by their own metrics")}
    for _, panel in PANELS:
        # What answers nothing is understood nevertheless.
        assert shown(panel) or running.empty(panel) == [query.expr for query in panel.queries]


@pytest.mark.engine
def test_what_is_excluded_has_these_names_in_vllms_own_source(engine_python: Path) -> None:
    stats = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py"
    (source,) = engine_python.parents[1].glob(f"lib/python3*/site-packages/{stats}")
    counted = set(re.findall(r'name="(vllm:\w+)"', source.read_text()))
    assert {re.sub(r"_(bucket|total)$", "", name) for name in REAL_ENGINES_ONLY} <= counted


def test_every_metric_that_an_alert_names_is_there(running: Watched) -> None:
    named = {selector.metric for rule in rules() for selector in selectors(rule["expr"])}
    present = running.present()
    assert {name for name in named if not present & {name, f"{name}_bucket"}} == WITH_TENANTS_ONLY


def test_prometheus_evaluates_every_alert_and_none_fires_or_is_about_to(running: Watched) -> None:
    def evaluated() -> bool:
        groups = running.prometheus.get("rules")["groups"]
        return all(rule["health"] != "unknown" for group in groups for rule in group["rules"])

    running.prometheus.eventually(evaluated, "not all rules were evaluated")
    found = [rule for group in running.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in found} == {rule["alert"] for rule in rules()}
    assert {rule["name"]: rule["lastError"] for rule in found if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in found if rule["state"] == "firing"] == []
    pending = {rule["name"] for rule in found if rule["state"] != "inactive"}
    assert pending <= OF_THE_TURN_THAT_FAILED | OF_A_SLOW_MACHINE


def test_every_target_is_read(running: Watched) -> None:
    targets = running.prometheus.get("targets")["activeTargets"]
    assert {target["labels"]["job"] for target in targets} == {"backhaul", "engines"}
    assert {target["scrapeUrl"]: target["lastError"] for target in targets if target["health"] != "up"} == {}
