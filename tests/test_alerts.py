"""Each alert fires when it is to, neither before nor when all is well: `promtool test rules` on series of a table."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.dashboards import rules
from tests.fakes.prometheus import promtool

JOB = 'job="backhaul"'
NODE = f'{JOB}, instance="a:9464"'
INFO = f'target_info{{{NODE}, service_name="backhaul-node-agent", service_instance_id="decode-1"}}'

Series = Mapping[str, str]
"""Values of series in promtool's notation: one a minute."""


@dataclass(frozen=True, slots=True)
class Case:
    """When an alert is to fire, and when not."""

    fires: Series
    well: Series
    after_min: int
    """Minutes after which it fires; a minute before it does not yet."""


def always(value: float) -> str:
    """Returns a value that stays for two hours."""
    return f"{value}x120"


def growing(per_min: float) -> str:
    """Returns a counter that grows for two hours."""
    return f"0+{per_min}x120"


def once(at_min: int) -> str:
    """Returns a counter that counts once."""
    return f"0x{at_min - 1} 1x{120 - at_min}"


def router(name: str, labels: str = "") -> str:
    return f"backhaul_router_{name}{{{NODE}{labels and ', '}{labels}}}"


def agent(name: str, labels: str = "") -> str:
    return f"backhaul_agent_{name}{{{NODE}{labels and ', '}{labels}}}"


def registry(name: str, labels: str = "") -> str:
    return f"backhaul_registry_{name}{{{NODE}{labels and ', '}{labels}}}"


def turns(result: str, route: str = "warm") -> str:
    return router("turns_total", f'route="{route}", result="{result}", model="m"')


def timed(name: str, below: str, above: str, labels: str = "", *, slow: bool) -> Series:
    """Returns a histogram whose values are all below a bound, or all between it and the next."""
    first, second, last = (
        f'{name}_bucket{{{NODE}, le="{le}"{labels and ", "}{labels}}}' for le in (below, above, "+Inf")
    )
    return {first: always(0) if slow else growing(60), second: growing(60), last: growing(60)}


def of_node(series: Series) -> Series:
    return {**series, INFO: always(1)}


TTFT = "backhaul_router_ttft_seconds"
PUBLISH = "backhaul_agent_publish_duration_seconds"
ETCD = "db_client_operation_duration_seconds"
TXN = 'db_operation_name="txn"'
TLS = f'backhaul_tls_remaining_seconds{{{NODE}, name="services"}}'
STARTS = f"process_start_time_seconds{{{NODE}}}"
OPEN, MOST = (f"process_{name}_fds{{{NODE}}}" for name in ("open", "max"))
REFUSED = f'backhaul_grpc_refused_calls_total{{{NODE}, kind="streams"}}'
A_DAY = 24 * 60

CASES = {
    "BackhaulNoRouter": Case(
        {registry("nodes", 'state="ready"'): always(1)}, {router("nodes", 'state="closed"'): always(0)}, 5
    ),
    "BackhaulTurnsFail": Case(
        {turns("ok"): growing(90), turns("error_503"): growing(6)},
        {turns("ok"): growing(90), turns("failed"): growing(2), turns("error_429"): growing(50)},
        6,
    ),
    "BackhaulTurnsRefused": Case(
        {turns("ok"): growing(90), router("refusals_total", 'reason="too_many_turns"'): growing(1)},
        {turns("ok"): growing(300), router("refusals_total", 'reason="too_many_turns"'): growing(1)},
        11,
    ),
    "BackhaulFirstByteSlow": Case(timed(TTFT, "10.0", "30.0", slow=True), timed(TTFT, "10.0", "30.0", slow=False), 11),
    "BackhaulTargetDown": Case({f"up{{{NODE}}}": always(0)}, {f"up{{{NODE}}}": always(1)}, 2),
    "BackhaulNoNodeReady": Case(
        {registry("nodes", 'state="ready"'): always(0), registry("nodes", 'state="not_ready"'): always(2)},
        {registry("nodes", 'state="ready"'): always(1), registry("nodes", 'state="not_ready"'): always(2)},
        1,
    ),
    "BackhaulNodeNotReady": Case(of_node({agent("ready"): always(0)}), of_node({agent("ready"): always(1)}), 15),
    "BackhaulNodeEjected": Case(
        # As it is, in the end: open, tried, open again.
        {router("nodes", 'state="open"'): "1 0 " * 20, router("nodes", 'state="half_open"'): "0 1 " * 20},
        {router("nodes", 'state="open"'): always(0), router("nodes", 'state="starting"'): always(1)},
        5,
    ),
    "BackhaulAgentGone": Case({router("orphans"): always(1)}, {router("orphans"): always(0)}, 2),
    "BackhaulLeaseLost": Case(of_node({agent("lease"): always(0)}), of_node({agent("lease"): always(1)}), 1),
    "BackhaulConnectorAway": Case(
        of_node({agent("connectors"): "2x9 1x60"}), of_node({agent("connectors"): always(1)}), 15
    ),
    "BackhaulPrefillMissing": Case({router("fallbacks_total"): growing(1)}, {router("fallbacks_total"): always(7)}, 6),
    "BackhaulHandOffsMissing": Case(
        {router("missing_handoffs_total"): once(20)}, {router("missing_handoffs_total"): always(7)}, 20
    ),
    "BackhaulPairApart": Case({router("pairs_apart_total"): once(20)}, {router("pairs_apart_total"): always(7)}, 20),
    "BackhaulColdByFault": Case(
        {turns("ok"): growing(90), router("misses_total", 'reason="lookup_timeout"'): growing(9)},
        {turns("ok"): growing(90), router("misses_total", 'reason="first_turn"'): growing(60)},
        11,
    ),
    "BackhaulReuseFell": Case(
        {turns("ok"): f"0+80x{A_DAY} {80 * A_DAY}+20x180", turns("ok", "cold"): f"0+20x{A_DAY} {20 * A_DAY}+80x180"},
        {turns("ok"): f"0+80x{A_DAY + 180}", turns("ok", "cold"): f"0+20x{A_DAY + 180}"},
        # From 80 to less than 40 of 100 within half an hour, and half an hour more.
        A_DAY + 51,
    ),
    "BackhaulPublishingSlow": Case(
        timed(PUBLISH, "1.0", "5.0", slow=True), timed(PUBLISH, "1.0", "5.0", slow=False), 11
    ),
    "BackhaulPublishingStuck": Case(
        of_node({agent("block_sets_unpublished"): "0x4 3x60", f"{PUBLISH}_count{{{NODE}}}": always(9)}),
        of_node({agent("block_sets_unpublished"): always(3), f"{PUBLISH}_count{{{NODE}}}": growing(9)}),
        15,
    ),
    "BackhaulWatchLost": Case({router("registry_watch"): always(0)}, {router("registry_watch"): always(1)}, 1),
    "BackhaulMemoryShort": Case(
        of_node({agent("blocks"): always(1000), agent("blocks_free"): always(19)}),
        of_node({agent("blocks"): always(1000), agent("blocks_free"): always(21)}),
        15,
    ),
    "BackhaulRenewalsUnconfirmed": Case(
        of_node({agent("renewals_total"): growing(1), agent("deadlines_confirmed_total"): always(4)}),
        of_node({agent("renewals_total"): growing(1), agent("deadlines_confirmed_total"): growing(1)}),
        6,
    ),
    "BackhaulNotificationsLost": Case(
        of_node({agent("notifications_lost_total", 'reason="not_sent"'): once(20)}),
        of_node({agent("notifications_lost_total", 'reason="not_sent"'): always(7)}),
        20,
    ),
    "BackhaulEtcdAway": Case({registry("etcd_available"): always(0)}, {registry("etcd_available"): always(1)}, 1),
    "BackhaulEtcdFull": Case({registry("etcd_full"): "0x4 1x60"}, {registry("etcd_full"): always(0)}, 5),
    "BackhaulEtcdCorrupt": Case({registry("etcd_corrupt"): "0x4 1x60"}, {registry("etcd_corrupt"): always(0)}, 5),
    "BackhaulEtcdSlow": Case(
        timed(ETCD, "0.05", "0.1", TXN, slow=True), timed(ETCD, "0.05", "0.1", TXN, slow=False), 11
    ),
    "BackhaulTenantsFileRefused": Case(
        {router("tenants_reads_total", 'result="refused"'): once(20)},
        {router("tenants_reads_total", 'result="taken"'): once(20)},
        20,
    ),
    "BackhaulCertificateEnds": Case({TLS: always(6 * 86400)}, {TLS: always(8 * 86400)}, 10),
    "BackhaulCertificateEndsToday": Case({TLS: f"{86400 + 270}-60x60"}, {TLS: always(2 * 86400)}, 5),
    "BackhaulCallsRefused": Case({REFUSED: growing(1)}, {REFUSED: always(7)}, 6),
    "BackhaulRestarts": Case({STARTS: "1 1 2 2 3 3 4 4x60"}, {STARTS: "1 1 2 2 3 3x60"}, 6),
    "BackhaulOpenFilesShort": Case(
        {OPEN: always(900), MOST: always(1024)}, {OPEN: always(700), MOST: always(1024)}, 10
    ),
}


def test_every_alert_is_in_the_table() -> None:
    assert list(CASES) == [rule["alert"] for rule in rules()]


@pytest.mark.parametrize("alert", CASES)
def test_it_fires_in_time_and_not_when_all_is_well(alert: str, tmp_path: Path) -> None:
    case = CASES[alert]
    blocks = [_block(alert, case.fires, {case.after_min - 1: 0, case.after_min: 1})]
    blocks += [_block(alert, case.well, {case.after_min + minutes: 0 for minutes in (0, 15)})]
    rule = next(rule for rule in rules() if rule["alert"] == alert)
    _write(tmp_path / "rule.yaml", {"groups": [{"name": "alone", "rules": [rule]}]})
    _write(tmp_path / "test.yaml", {"rule_files": ["rule.yaml"], "tests": blocks})
    result = promtool("test", "rules", tmp_path / "test.yaml")
    assert result.returncode == 0, result.stdout + result.stderr


def _write(path: Path, content: object) -> None:
    path.write_text(yaml.safe_dump(content, width=1000))


def _block(alert: str, series: Series, firing: Mapping[int, int]) -> object:
    """Returns a test of promtool: how many of the alert fire at these minutes."""
    expr = f"count(ALERTS{{alertname={json.dumps(alert)}, alertstate='firing'}}) or vector(0)"
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values.strip()} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": count}]}
            for minute, count in firing.items()
        ],
    }
