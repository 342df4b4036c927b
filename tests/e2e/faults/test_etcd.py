"""What happens to etcd as a whole, each alone: it goes back in time, forgets, fills up, and knows no tokens any more.

Bounds are for a busy machine of two cores; docs/reliability.md has what was measured.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from backhaul_local.stack import Stack
from tests.e2e.faults.conftest import SEED
from tests.e2e.faults.test_recovery import NONE, check
from tests.soak.cluster import ETCD_QUOTA_BYTES, cluster_options
from tests.soak.etcd_admin import EtcdAdmin
from tests.soak.etcd_faults import EtcdFaults
from tests.soak.faults import Fault
from tests.soak.network import BreakableNetwork
from tests.soak.recovery import Load

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def stack(network: BreakableNetwork, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two of everything, three etcd members that are soon full."""
    options = cluster_options(
        tmp_path_factory.mktemp("s"),
        seed=SEED,
        router_flags=["--prefer", "warm"],
        routers=2,
        registries=2,
        network=network,
        etcd_quota_bytes=ETCD_QUOTA_BYTES,
    )
    with Stack(options) as stack:
        yield stack


@pytest.fixture(scope="module")
def faults(stack: Stack, network: BreakableNetwork, tmp_path_factory: pytest.TempPathFactory) -> EtcdFaults:
    """What can happen to this etcd, in which nobody reads or writes without a token."""
    return EtcdFaults(stack, network, tmp_path_factory.mktemp("snapshots"))


def seen(fault: Fault, admin: EtcdAdmin, notes: list[int]) -> Fault:
    """Returns the fault; notes etcd's revision before it ends."""

    def end(stack: Stack) -> None:
        notes.append(admin.session().revision())
        fault.end(stack)

    return replace(fault, end=end)


async def test_turns_go_on_when_etcd_goes_back_in_time(stack: Stack, load: Load, faults: EtcdFaults) -> None:
    saved = faults.admin.session().revision()
    latest: list[int] = []
    restored = seen(faults.restore(), faults.admin, latest)
    await check(restored, stack, load, told=NONE, within_s=40)
    assert latest[0] > saved


async def test_a_registry_lists_again_what_was_compacted_while_it_was_away(
    stack: Stack, load: Load, faults: EtcdFaults
) -> None:
    await check(faults.compact("registry-1"), stack, load, told=NONE, within_s=30)


async def test_turns_go_on_cold_while_etcd_is_full(stack: Stack, load: Load, faults: EtcdFaults) -> None:
    alarms: list[dict[str, str]] = []
    full = faults.fill()

    def end(stack: Stack) -> None:
        alarms.extend(faults.admin.session().alarms())
        full.end(stack)

    await check(replace(full, end=end), stack, load, told=NONE, within_s=40)
    assert {alarm["alarm"] for alarm in alarms} == {"NOSPACE"}
    assert faults.admin.session().alarms() == []


async def test_tokens_that_end_in_use_are_renewed(stack: Stack, load: Load, faults: EtcdFaults) -> None:
    await check(faults.expire_tokens(), stack, load, told=NONE, within_s=30)
