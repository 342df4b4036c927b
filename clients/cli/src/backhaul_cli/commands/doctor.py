"""`backhaul doctor`: what keeps turns from reusing blocks, and what to do."""

from collections import Counter
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from backhaul_cli.collect import collect
from backhaul_cli.core.doctor import diagnose, stops_reuse
from backhaul_cli.core.finding import Finding, Severity
from backhaul_cli.core.snapshot import Snapshot
from backhaul_cli.exits import Exit
from backhaul_cli.output import console, counted, plain, print_json
from backhaul_cli.running import running
from backhaul_cli.settings import Settings, with_settings

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_MIB = 1024 * 1024
_WIDEST = 120


@click.command("doctor")
@click.option("--model", default="", help="Model whose chat template is tried; the first four by default.")
@click.option(
    "--etcd-quota-mib",
    default=2048,
    show_default=True,
    type=click.IntRange(min=1),
    help="etcd's --quota-backend-bytes, in MiB.",
)
@with_settings
@click.pass_context
def doctor(context: click.Context, settings: Settings, model: str, etcd_quota_mib: int) -> None:
    """Find what stops reuse, and say how to mend it. Ends with 6 when something does.

    Asks registries, agents and a router; runs no turn and changes nothing.
    """
    with running(settings) as services:
        snapshot = collect(services, settings, model=model, etcd_quota_bytes=etcd_quota_mib * _MIB)
    findings = diagnose(snapshot)
    if settings.as_json:
        print_json([{**asdict(finding), "severity": finding.severity.value} for finding in findings])
    else:
        _print(console(), snapshot, findings)
    context.exit(Exit.FOUND if stops_reuse(findings) else Exit.DONE)


def _print(out: Console, snapshot: Snapshot, findings: list[Finding]) -> None:
    for finding in findings:
        head = Text.assemble(
            (finding.severity.value, _STYLES[finding.severity]), "  ", (finding.subject, "bold"), "  ", finding.check
        )
        out.print(head)
        click.echo(_paragraph(finding.what, out.width))
        click.echo(_paragraph(f"Fix: {finding.fix}", out.width) + "\n")
    out.print(Text(_summary(snapshot, findings)))


def _paragraph(text: str, width: int) -> str:
    return click.wrap_text(plain(text), min(width, _WIDEST), initial_indent="  ", subsequent_indent="  ")


def _summary(snapshot: Snapshot, findings: list[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    looked = f"looked at {_registries(len(snapshot.registries))} and {counted(len(snapshot.nodes or ()), 'node')}"
    if not findings:
        return f"Nothing found: {looked}."
    return f"{', '.join(counted(counts[severity], severity.value) for severity in Severity)}; {looked}."


def _registries(count: int) -> str:
    return "1 registry" if count == 1 else f"{count} registries"
