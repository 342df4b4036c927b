"""Whether etcd is fit for the index."""

import re
from collections.abc import Iterator

from backhaul_cli.core.finding import Finding, error, note, warning
from backhaul_cli.core.snapshot import Etcd, Snapshot

SLOW_READ_S = 0.02
"""A lookup has 50 ms by default, for a read and a claim."""
SLOW_WRITE_S = 0.05
"""etcd itself wants its log flushed within 10 ms (docs, "Hardware recommendations"); a turn should be found in 20."""
MANY_REVISIONS = 100_000
"""A cluster that was never compacted by then does not compact by itself."""
NEARLY_FULL = 0.8
_LOSSY = ("3.5.0", "3.5.1", "3.5.2")


def etcd(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds what is wrong with etcd, seen by each registry; once where they agree."""
    seen: set[tuple[str, str]] = set()
    for registry in snapshot.registries:
        for finding in _of(registry.etcd, snapshot.etcd_quota_bytes) if registry.etcd is not None else ():
            if (finding.check, finding.subject) not in seen:
                seen.add((finding.check, finding.subject))
                yield finding
        if registry.etcd_problem:
            make = note if registry.too_old else error
            yield make(
                "registry-too-old" if registry.too_old else "etcd-unreachable",
                f"registry {registry.address}",
                f"The registry says nothing of etcd: {registry.etcd_problem}.",
                "Upgrade it to the version of this command."
                if registry.too_old
                else "See that etcd has a quorum and that --etcd-endpoints of the registry names its client addresses.",
            )


def _of(etcd: Etcd, quota_bytes: int) -> Iterator[Finding]:
    subject = f"etcd {etcd.endpoint}"
    yield from _speed(etcd, subject)
    yield from _space(etcd, subject, quota_bytes)
    if etcd.corrupt:
        yield error(
            "etcd-corrupt",
            subject,
            "etcd says that its members' data differ (alarm CORRUPT).",
            "Replace the member that raised the alarm: etcdctl alarm list, member remove, member add.",
        )
    if etcd.version in _LOSSY:
        yield warning(
            "etcd-version",
            subject,
            f"etcd {etcd.version} can lose data when it is killed under load (etcd-io/etcd#13766): nodes and what "
            "they hold would vanish from the index until they publish anew.",
            "Run 3.5.7 or newer, or 3.4.23.",
        )
    elif not _sound(etcd.version):
        yield warning(
            "etcd-version",
            subject,
            f"etcd {etcd.version} is older than what Backhaul is tested with; some of these versions end with a panic "
            "when a read is cancelled (etcd-io/etcd#14110).",
            "Run 3.5.7 or newer, or 3.4.23.",
        )


def _speed(etcd: Etcd, subject: str) -> Iterator[Finding]:
    slow = [("reads", etcd.read_s, SLOW_READ_S), ("writes", etcd.write_s, SLOW_WRITE_S)]
    over = [f"{name} take {took_s * 1000:.0f} ms" for name, took_s, most_s in slow if took_s > most_s]
    if over:
        yield warning(
            "etcd-slow",
            subject,
            f"etcd is slow: {' and '.join(over)}. Lookups run out of their budget (lookup_timeout), and a turn that "
            "follows quickly is not found yet.",
            "Give etcd a fast disk of its own (SSD: its log is flushed at each write), members near the registries, "
            "and enough CPU; until then raise --lookup-budget-s of the routers.",
        )


def _space(etcd: Etcd, subject: str, quota_bytes: int) -> Iterator[Finding]:
    if etcd.full:
        yield error(
            "etcd-full",
            subject,
            "etcd is full (alarm NOSPACE): nothing new is published, so turns get cold as pointers lapse.",
            "etcdctl compact REVISION, etcdctl defrag, etcdctl alarm disarm; then set --auto-compaction-retention=1h "
            "and, if need be, a larger --quota-backend-bytes.",
        )
    elif etcd.size_bytes > NEARLY_FULL * quota_bytes:
        yield warning(
            "etcd-quota",
            subject,
            f"etcd's database has {etcd.size_bytes / 2**20:.0f} of {quota_bytes / 2**20:.0f} MiB: when it is full, "
            "nothing is published any more.",
            "Set --auto-compaction-retention=1h, run etcdctl defrag, or raise --quota-backend-bytes (and tell doctor "
            "with --etcd-quota-mib).",
        )
    if not etcd.compacted and etcd.revision > MANY_REVISIONS:
        yield warning(
            "etcd-never-compacted",
            subject,
            f"etcd has kept all of its {etcd.revision:,} revisions: each turn makes some, and they fill its database.",
            "Start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=1h.",
        )


def _sound(version: str) -> bool:
    """Tells whether a version is one that Backhaul is tested with, or newer; unknown ones are."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        return True
    major, minor, patch = map(int, match.groups())
    return (
        (major, minor) >= (3, 6)
        or (major, minor, patch) >= (3, 5, 7)
        or (3, 4, 23) <= (major, minor, patch) < (3, 5, 0)
    )
