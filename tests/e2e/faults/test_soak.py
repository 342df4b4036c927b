"""Short random runs: with nothing broken, with everything broken now and then, with reads that outlast their claims.

`make soak` plays a long one.
"""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backhaul_local.stack import Stack
from tests.soak.cluster import CLAIM_TTL_S, ETCD_QUOTA_BYTES, cluster_options
from tests.soak.etcd_faults import EtcdFaults
from tests.soak.faults import Fault, everything, scripted
from tests.soak.network import BreakableNetwork
from tests.soak.report import problems
from tests.soak.soak import Plan, soak

pytestmark = pytest.mark.timeout(300)


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Returns what a failed test shows."""
    return {name: report[name] for name in ("outcomes", "routes", "misses", "engines_counted", "faults", "wrong")}


async def test_random_conversations_get_the_texts_of_an_engine_that_computes_everything(tmp_path: Path) -> None:
    options = cluster_options(
        tmp_path, seed=1, router_flags=["--prefer", "warm"], routers=3, registries=2, etcd_members=1
    )
    with Stack(options) as stack:
        report = await soak(stack, Plan(seed=1, turn_count=1500, concurrency=16))
    assert problems(report, faults_allowed=False) == [], summary(report)
    assert report["engines_counted"]["claimed_reads_completed"] > 300


async def test_random_faults_never_cause_a_wrong_text_nor_a_second_read(tmp_path: Path) -> None:
    with BreakableNetwork() as network:
        options = cluster_options(
            tmp_path,
            seed=2,
            routers=3,
            registries=2,
            etcd_members=1,
            network=network,
            etcd_quota_bytes=ETCD_QUOTA_BYTES,
        )
        with Stack(options) as stack:
            etcd = EtcdFaults(stack, network, tmp_path / "snapshots")
            plan = Plan(seed=2, turn_count=1500, concurrency=16, limit_s=60, fault_every_s=1.0)
            report = await soak(stack, plan, partial(everything, stack, network, etcd=etcd.draw))
    assert problems(report, faults_allowed=True) == [], summary(report)
    assert len(report["faults"]) > 10


async def test_reads_that_outlast_their_claims_are_never_used(tmp_path: Path) -> None:
    def slow_reads(rng: Random) -> Fault:
        reader = rng.choice(["prefill-1", "prefill-2"])
        pause_s = rng.uniform(0.1, 0.6) * CLAIM_TTL_S
        return scripted(reader, {"fault": "slow_reads", "seconds_per_block": pause_s, "times": 3})

    # A small memory: blocks that were freed are soon those of another request.
    options = cluster_options(
        tmp_path,
        seed=3,
        router_flags=["--prefer", "warm"],
        routers=1,
        registries=1,
        etcd_members=1,
        block_count=1500,
        warm_prefill_s=3 * CLAIM_TTL_S,
    )
    with Stack(options) as stack:
        plan = Plan(seed=3, turn_count=1800, concurrency=16, limit_s=100, fault_every_s=1.0)
        report = await soak(stack, plan, slow_reads)
    assert problems(report, faults_allowed=False) == [], summary(report)
    assert report["engines_counted"]["late_reads_failed"] > 0
