"""All that is measured: arms take turns, so that what else the machine does meets each of them."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from backhaul_local.options import StackOptions
from backhaul_local.ports import Ports
from backhaul_local.processes import Supervisor
from backhaul_local.progress import Steps
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from benchmarks.registry import disk, node
from benchmarks.registry.callers import finders, publishers
from benchmarks.registry.filled import Filled, Size, fill, size_of
from benchmarks.registry.load import Call, Timings, measure
from benchmarks.registry.node import Memory
from benchmarks.registry.sites import ARMS, BARE, Server, Site, open_bare, open_site

FIND, PUBLISH, PUBLISH_MANY, CLAIM = "find", "publish", "publish 100", "claim"
AGENT = "agent"
MANY = 100
"""Pointers of a large batch; as many as one transaction takes."""
ALONE, CROWD = 1, 32
"""Callers at once."""
IDLE, LOADED = "idle", "loaded"
PLAIN, TRACED = "plain", "of a traced turn"

_SIZED = 50_000
"""Pointers by which sizes are measured where they are not those of the sites."""
_ENGINE = ("--decode-step-s", "0.001", "--prefill-tokens-per-s", "1000000", "--block-count", "40000")
_IDLE_TURNS_PER_S = 5.0
_FINDABLE_TIMES = 7
"""How much longer turns are played than callers call: there are few of them in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    pointer_counts: Sequence[int]
    rounds: int
    seconds: float
    """Of each operation of each arm, each round."""
    set_count: int
    """Sets that the agent holds while claims are measured."""
    loaded_turns_per_s: float
    """Turns of the decode node while it is loaded."""


@dataclass(slots=True)
class Results:
    """What was seen."""

    timings: dict[tuple[str, int, str, int], Timings] = field(default_factory=lambda: defaultdict(Timings))
    """By operation, pointers (sets, of claims), arm and callers."""
    sizes: dict[str, Size] = field(default_factory=dict)
    """By what kind of pointers."""
    findable: dict[str, Timings] = field(default_factory=lambda: defaultdict(Timings))
    """By load."""
    fsyncs: dict[str, "Counter[float]"] = field(default_factory=lambda: defaultdict(Counter))
    """What etcd waited for its disk meanwhile, by load: see `disk.Buckets`."""
    memory: Memory | None = None
    """Of sets, in the agent and the registry."""


def run(plan: Plan, state: Path, steps: Steps) -> Results:
    """Measures all. Raises LocalError."""
    results = Results()
    with Supervisor(state / "logs") as supervisor:
        ports = Ports()
        etcds = _etcds(plan, supervisor, ports, state, steps, results)
        sites = _sites(etcds, supervisor, ports, steps)
        asyncio.run(_measure_sites(plan, sites, steps, results))
    for etcd in etcds:
        etcd.remove()
    _measure_node(plan, state, steps, results)
    return results


def _etcds(
    plan: Plan, supervisor: Supervisor, ports: Ports, state: Path, steps: Steps, results: Results
) -> Sequence[Filled]:
    def filled(name: str, count: int, *, traced: bool = False) -> Filled:
        with _step(steps, f"Writing {count:,} pointers{' of traced turns' if traced else ''}"):
            return fill(
                name,
                count,
                supervisor=supervisor,
                ports=ports,
                data=state,
                traced=traced,
                going_on=steps.waiting,
            )

    def sized(kind: str, etcd: Filled) -> None:
        with _step(steps, f"Compacting and defragmenting {etcd.pointer_count:,} pointers"):
            results.sizes[kind] = size_of(etcd)

    traced = filled("etcd-traced", _SIZED, traced=True)
    sized(TRACED, traced)
    supervisor.kill("etcd-traced")
    traced.remove()
    etcds = [filled(f"etcd-{count}", count) for count in plan.pointer_counts]
    sized(PLAIN, etcds[-1])
    return etcds


def _sites(etcds: Sequence[Filled], supervisor: Supervisor, ports: Ports, steps: Steps) -> Sequence[Site]:
    with _step(steps, "Starting registries and bare handlers"):
        return [open_site(etcd, supervisor, ports) for etcd in etcds]


@contextmanager
def _step(steps: Steps, name: str) -> Iterator[None]:
    steps.begin(name)
    yield
    steps.end(name)


async def _measure_sites(plan: Plan, sites: Sequence[Site], steps: Steps, results: Results) -> None:
    for number in range(plan.rounds):
        for operation, callers in ((FIND, ALONE), (FIND, CROWD), (PUBLISH, ALONE), (PUBLISH, CROWD), (PUBLISH_MANY, 4)):
            with _step(steps, f"{operation}, {callers} at once, round {number + 1} of {plan.rounds}"):
                for site, arm in _turns(sites, number):
                    await _measure_arm(operation, callers, site, arm, plan, results)
                    steps.waiting()


async def _measure_arm(operation: str, callers: int, site: Site, arm: str, plan: Plan, results: Results) -> None:
    servers = site.arms[arm]
    timings = results.timings[operation, site.pointer_count, arm, callers]
    async with _calls(operation, servers, callers, site.pointer_count) as calls:
        await measure(calls, plan.seconds, [server.pid for server in servers], timings)


def _turns(sites: Sequence[Site], number: int) -> Iterator[tuple[Site, str]]:
    """Yields each arm of each site; who begins changes from round to round."""
    turns = [(site, arm) for site in sites for arm in ARMS]
    first = number % len(turns)
    yield from (*turns[first:], *turns[:first])


def _calls(
    operation: str, servers: Sequence[Server], callers: int, pointer_count: int
) -> AbstractAsyncContextManager[Sequence[Call]]:
    addresses = [server.address for server in servers]
    if operation == FIND:
        return finders(addresses, callers, pointer_count)
    return publishers(addresses, callers, MANY if operation == PUBLISH_MANY else 1)


def _measure_node(plan: Plan, state: Path, steps: Steps, results: Results) -> None:
    options = StackOptions(
        state=state / "node", prefill=[], decode=[SimulatedEngine(ttl_s=30, flags=_ENGINE)], routers=0
    )
    with Stack(options, steps) as stack, Supervisor(state / "logs") as supervisor:
        bare = open_bare("bare-claims", stack.etcd_endpoints[0], supervisor, Ports())
        agent = stack.node("decode-1")
        arms = {BARE: bare, AGENT: Server(agent.agent_address, stack.process(agent.agent).pid)}
        asyncio.run(_measure_turns(plan, stack, steps, results))
        asyncio.run(_measure_claims(plan, stack, arms, steps, results))


async def _measure_turns(plan: Plan, stack: Stack, steps: Steps, results: Results) -> None:
    loads = {IDLE: _IDLE_TURNS_PER_S, LOADED: plan.loaded_turns_per_s}
    async with node.player(stack) as played:
        for number in range(plan.rounds):
            for load, turns_per_s in loads.items():
                step = f"From the last token to the pointer, {load}, round {number + 1} of {plan.rounds}"
                with _step(steps, step):
                    seconds = _FINDABLE_TIMES * plan.seconds
                    timings = results.findable[load]
                    before = await played.fsyncs()
                    await node.findable(played, turns_per_s=turns_per_s, seconds=seconds, timings=timings)
                    results.fsyncs[load] += disk.since(before, await played.fsyncs())


async def _measure_claims(plan: Plan, stack: Stack, arms: dict[str, Server], steps: Steps, results: Results) -> None:
    async with AsyncExitStack() as held:
        with _step(steps, f"Publishing {plan.set_count:,} sets of one agent"):
            results.memory = await held.enter_async_context(node.holding(stack, plan.set_count))
        for number in range(plan.rounds):
            with _step(steps, f"{CLAIM}, round {number + 1} of {plan.rounds}"):
                for callers in (ALONE, CROWD):
                    for arm in (*arms,)[:: 1 if number % 2 else -1]:
                        timings = results.timings[CLAIM, plan.set_count, arm, callers]
                        async with node.claimers(arms[arm].address, callers, plan.set_count) as calls:
                            await measure(calls, plan.seconds, [arms[arm].pid], timings)
