"""Every fault alone: what clients notice of it, and how soon everything is as before.

Bounds are for a busy machine of two cores; docs/reliability.md has what was measured.
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from backhaul_local.stack import Stack
from tests.soak.faults import (
    Fault,
    cut,
    etcd_leader,
    freeze,
    kill,
    other_role,
    restarting,
    scripted,
    slow,
    stop,
    swallow,
    together,
)
from tests.soak.network import BreakableNetwork
from tests.soak.recovery import Load, Recovery, reach, recovery_from

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

NONE: tuple[str, ...] = ()
ROUTER = ("connection: ",)
"""A client whose router is killed loses its connection; nobody else notices."""
STREAMS = ("event: the decode engine failed", "502 the decode engine failed")
"""A decode engine that dies in the middle of an answer: an error in the answer, or in place of it."""
TWICE = ("503 the decode engine failed (abandoned)",)
"""A turn that is repeated as its decode engine died, and whose blocks the other one cannot read then."""

_record = os.environ.get("BACKHAUL_RECOVERY_RECORD")


def note(recovery: Recovery) -> None:
    """Appends what was measured to the file that BACKHAUL_RECOVERY_RECORD names."""
    if _record:
        with Path(_record).open("ab") as file:
            file.write(msgspec.json.encode(recovery) + b"\n")


async def check(
    fault: Fault, stack: Stack, load: Load, *, told: tuple[str, ...], within_s: float, holder: str = ""
) -> Recovery:
    """Lets a fault happen; fails when clients are told anything else, or when it is not over in time."""
    recovery = await recovery_from(fault, stack, load, within_s=within_s, holder=holder)
    note(recovery)
    unexpected = {word for word in recovery.failures if not word.startswith(told)} if told else set(recovery.failures)
    assert not unexpected, recovery
    return recovery


@pytest.mark.parametrize(
    ("name", "told", "within_s", "holder"),
    [
        ("registry-1", NONE, 15, ""),
        ("router-1", ROUTER, 15, ""),
        ("agent-prefill-1", NONE, 25, ""),
        ("agent-decode-1", NONE, 25, "decode-1"),
        ("prefill-1", NONE, 20, ""),
        ("decode-1", STREAMS, 25, "decode-1"),
    ],
)
async def test_a_killed_process_is_missed_only_by_what_it_was_doing(
    stack: Stack, load: Load, name: str, told: tuple[str, ...], within_s: float, holder: str
) -> None:
    await check(kill(name), stack, load, told=told, within_s=within_s, holder=holder)


@pytest.mark.parametrize(
    ("name", "told", "holder"),
    [
        ("registry-1", NONE, ""),
        ("router-1", NONE, ""),
        ("agent-prefill-1", NONE, ""),
        ("agent-decode-1", NONE, "decode-1"),
        ("prefill-1", NONE, ""),
        ("decode-1", STREAMS, "decode-1"),
    ],
)
async def test_a_process_that_is_asked_to_end_is_hardly_missed(
    stack: Stack, load: Load, name: str, told: tuple[str, ...], holder: str
) -> None:
    await check(stop(name), stack, load, told=told, within_s=40, holder=holder)


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("registry-1", ""),
        ("router-1", ""),
        ("agent-prefill-1", ""),
        ("agent-decode-1", "decode-1"),
        ("prefill-1", ""),
        ("decode-1", "decode-1"),
    ],
)
async def test_a_process_that_freezes_delays_turns_and_fails_none(
    stack: Stack, load: Load, name: str, holder: str
) -> None:
    await check(freeze(name), stack, load, told=NONE, within_s=30, holder=holder)


@pytest.mark.parametrize("make", [kill, freeze], ids=["killed", "frozen"])
async def test_an_etcd_leader_that_is_lost_costs_reuse_for_a_moment(
    stack: Stack, load: Load, make: Callable[[str], Fault]
) -> None:
    leader = f"etcd-{etcd_leader(stack.etcd_endpoints) + 1}"
    await check(make(leader), stack, load, told=NONE, within_s=25)


async def test_turns_are_served_while_etcd_has_no_quorum(stack: Stack, load: Load) -> None:
    members = together("freeze etcd-1, etcd-2", freeze("etcd-1", hold_s=6), freeze("etcd-2", hold_s=6))
    await check(members, stack, load, told=NONE, within_s=40)


BREAKS = [pytest.param(cut, id="cut"), pytest.param(swallow, id="silent"), pytest.param(slow, id="slow")]

LINKS = [
    ("registry-1 > etcd-1", ""),
    ("router-1 > registry-1", ""),
    ("agent-decode-1 > registry-1", "decode-1"),
    ("routers > agent-decode-1", "decode-1"),
    ("agent-decode-1 > decode-1", "decode-1"),
]


@pytest.mark.parametrize("make", BREAKS)
@pytest.mark.parametrize(("link", "holder"), LINKS, ids=[link for link, _ in LINKS])
async def test_turns_do_not_depend_on_a_link_of_the_control_plane(
    stack: Stack,
    network: BreakableNetwork,
    load: Load,
    make: Callable[[BreakableNetwork, str], Fault],
    link: str,
    holder: str,
) -> None:
    await check(make(network, link), stack, load, told=NONE, within_s=30, holder=holder)


@pytest.mark.parametrize(
    ("make", "link", "told"),
    [
        (cut, "routers > prefill-1", NONE),
        (swallow, "routers > prefill-1", NONE),
        (slow, "routers > prefill-1", NONE),
        (cut, "routers > decode-1", STREAMS),
        (swallow, "routers > decode-1", NONE),
        (slow, "routers > decode-1", NONE),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else None,
)
async def test_a_broken_link_to_an_engine_fails_at_most_answers_that_were_on_it(
    stack: Stack,
    network: BreakableNetwork,
    load: Load,
    make: Callable[[BreakableNetwork, str], Fault],
    link: str,
    told: tuple[str, ...],
) -> None:
    await check(make(network, link), stack, load, told=told, within_s=30)


async def test_links_before_engines_and_between_members_of_etcd_are_in_use(
    stack: Stack, network: BreakableNetwork, load: Load
) -> None:
    """Else breaking them would show nothing."""
    parts = [part for node in stack.nodes for part in (f"{node.name} side channel", f"{node.name} notifications")]
    links = [f"peers > {part}" for part in parts]
    links += [f"{node.agent} > {node.name} side channel" for node in stack.nodes]
    links += [f"{node.name} > {node.agent}" for node in stack.nodes]
    links += [f"members > etcd-{number}" for number in (1, 2, 3)]
    await reach(lambda: all(network.link(name).passed_bytes for name in links), 30, "a link is not used")


@pytest.mark.parametrize("make", BREAKS)
@pytest.mark.parametrize(
    ("link", "holder"),
    [
        ("decode-1 > agent-decode-1", "decode-1"),
        ("prefill-1 > agent-prefill-1", ""),
        ("peers > decode-1 notifications", "decode-1"),
        ("peers > prefill-1 notifications", ""),
    ],
)
async def test_what_an_engine_is_told_and_tells_may_come_late_or_never(
    stack: Stack,
    network: BreakableNetwork,
    load: Load,
    make: Callable[[BreakableNetwork, str], Fault],
    link: str,
    holder: str,
) -> None:
    await check(make(network, link), stack, load, told=NONE, within_s=40, holder=holder)


@pytest.mark.parametrize("make", BREAKS)
@pytest.mark.parametrize(
    ("link", "asker", "holder"),
    [
        ("agent-decode-1 > decode-1 side channel", "agent-decode-1", "decode-1"),
        ("peers > decode-1 side channel", "prefill-1", "decode-1"),
        ("peers > prefill-1 side channel", "decode-1", "decode-1"),
    ],
)
async def test_a_process_starts_while_the_side_channel_that_it_asks_is_broken(
    stack: Stack,
    network: BreakableNetwork,
    load: Load,
    make: Callable[[BreakableNetwork, str], Fault],
    link: str,
    asker: str,
    holder: str,
) -> None:
    """Who starts shakes hands, and so does who has not met an engine that started just before."""
    fault = make(network, link)
    told = (*STREAMS, *TWICE) if asker == "decode-1" else NONE
    await check(restarting(asker, fault), stack, load, told=told, within_s=40, holder=holder)


@pytest.mark.parametrize("make", BREAKS)
async def test_etcds_members_hear_one_another_late_or_not_at_all(
    stack: Stack, network: BreakableNetwork, load: Load, make: Callable[[BreakableNetwork, str], Fault]
) -> None:
    leader = f"etcd-{etcd_leader(stack.etcd_endpoints) + 1}"
    await check(make(network, f"members > {leader}"), stack, load, told=NONE, within_s=30)


@pytest.mark.parametrize("make", [cut, swallow], ids=["cut", "silent"])
async def test_turns_are_served_while_no_member_of_etcd_hears_another(
    stack: Stack, network: BreakableNetwork, load: Load, make: Callable[..., Fault]
) -> None:
    links = [make(network, f"members > etcd-{number}", hold_s=6) for number in (1, 2, 3)]
    name = f"{make.__name__} members > etcd-1, etcd-2, etcd-3"
    await check(together(name, *links), stack, load, told=NONE, within_s=40)


@pytest.mark.parametrize("make", BREAKS)
@pytest.mark.parametrize("holder", ["prefill-1", "decode-1"])
async def test_blocks_that_cannot_be_read_are_computed(
    stack: Stack,
    network: BreakableNetwork,
    load: Load,
    make: Callable[[BreakableNetwork, str], Fault],
    holder: str,
) -> None:
    await check(make(network, f"engines > {holder}"), stack, load, told=NONE, within_s=30)


async def test_a_node_that_comes_back_in_another_role_is_used_as_such(stack: Stack, load: Load) -> None:
    await check(other_role("decode-1", "decode", "prefill"), stack, load, told=STREAMS, within_s=40, holder="decode-1")


@pytest.mark.parametrize(
    ("name", "step", "told"),
    [
        ("prefill-1", {"fault": "bare_500", "times": 3, "warm": True}, NONE),
        ("prefill-1", {"fault": "finish_error", "times": 2, "warm": True}, NONE),
        ("prefill-1", {"fault": "no_params", "times": 5}, NONE),
        ("prefill-1", {"fault": "hang", "times": 2, "warm": True}, NONE),
        ("prefill-1", {"fault": "reset", "times": 3}, NONE),
        ("prefill-1", {"fault": "die"}, NONE),
        ("prefill-1", {"fault": "slow_reads", "times": 2, "seconds_per_block": 1.0}, NONE),
        ("decode-1", {"fault": "bare_500", "times": 2}, NONE),
        ("decode-1", {"fault": "finish_error", "times": 2}, NONE),
        ("decode-1", {"fault": "reset", "times": 2}, NONE),
        ("decode-1", {"fault": "die", "after": 0}, STREAMS),
        ("decode-1", {"fault": "reset", "after": 3, "stream": True}, STREAMS),
        ("decode-1", {"fault": "die", "after": 3, "stream": True}, STREAMS),
        ("decode-1", {"fault": "die", "after": "end", "stream": True}, STREAMS),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
async def test_an_engine_that_misbehaves_fails_at_most_answers_that_had_begun(
    stack: Stack, load: Load, name: str, step: dict[str, object], told: tuple[str, ...]
) -> None:
    # Turns that are held up are repeated 5 s later: a fault of the next test would be their second one.
    hold_s = 7.0 if step["fault"] in ("hang", "slow_reads") else 1.0
    await check(scripted(name, step, hold_s=hold_s, surely=True), stack, load, told=told, within_s=40)
