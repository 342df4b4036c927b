"""All checks, in the order in which their findings are read."""

from collections.abc import Callable, Iterable

from backhaul_cli.core.checks import clocks, connectors, etcd, pairs, reach, retention, templates
from backhaul_cli.core.finding import Finding, Severity
from backhaul_cli.core.snapshot import Snapshot

Check = Callable[[Snapshot], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    reach.registries,
    etcd.etcd,
    reach.nodes,
    reach.router,
    connectors.connectors,
    pairs.pairs,
    retention.renewals,
    retention.hand_offs,
    clocks.engine_clocks,
    connectors.nixl,
    connectors.kv_events,
    templates.templates,
    clocks.times_of_day,
)

_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def diagnose(snapshot: Snapshot) -> list[Finding]:
    """Returns what is wrong, what stops reuse first."""
    findings = [finding for check in CHECKS for finding in check(snapshot)]
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def stops_reuse(findings: Iterable[Finding]) -> bool:
    """Tells whether any of them does."""
    return any(finding.severity is Severity.ERROR for finding in findings)
