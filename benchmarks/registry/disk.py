"""How long etcd waits for its disk, by its own account."""

from collections import Counter
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_FSYNC = "etcd_disk_wal_fsync_duration_seconds"
"""etcd, server/wal/metrics.go: each write waits for one."""

Buckets = Mapping[float, float]
"""Number of fsyncs that took no longer than so many seconds."""


async def fsyncs(session: aiohttp.ClientSession, endpoint: str) -> Buckets:
    """Returns the fsyncs of an etcd since its start."""
    async with session.get(f"http://{endpoint}/metrics") as answer:
        return buckets_in(await answer.text())


def buckets_in(page: str) -> Buckets:
    """Returns the fsyncs of which a page of metrics tells."""
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return {float(sample.labels["le"]): sample.value for sample in samples if sample.name == f"{_FSYNC}_bucket"}


def since(before: Buckets, after: Buckets) -> "Counter[float]":
    """Returns the fsyncs between two looks."""
    return Counter({most_s: count - before.get(most_s, 0.0) for most_s, count in after.items()})


def quantile_s(buckets: Buckets, share: float) -> float | None:
    """Returns what a share of the fsyncs did not exceed, as exactly as etcd counts; None when there were none."""
    total = max(buckets.values(), default=0.0)
    return min((most_s for most_s, count in buckets.items() if count >= share * total), default=None) if total else None
