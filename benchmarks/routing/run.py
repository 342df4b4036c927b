"""One run: for each cluster a stack with a router per arm, and on it every load, every arm in turn."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backhaul_local.options import StackOptions
from backhaul_local.processes import LocalError
from backhaul_local.progress import Steps
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from backhaul_simulator.model import Model
from benchmarks.routing.arms import Arm
from benchmarks.routing.clusters import BLOCK_SIZE, CLUSTERS, Cluster, Speed
from benchmarks.routing.figures import Timed
from benchmarks.routing.loads import LOADS, Load
from benchmarks.routing.machine import CpuMeter
from benchmarks.routing.player import Played, Player
from benchmarks.routing.turn_log import Estimated, TurnLog

_TTL_S = 480.0
_LOOKUP_BUDGET_S = 0.25
"""Engines and services share the cores: a lookup now and then waits longer for one than the router's default allows."""

_WARM_UP = Load(name="warm-up", per_s={"chat": 1.5, "document": 0.5})
_WARM_UP_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a run goes."""

    seed: int
    loads: tuple[str, ...]
    arms: tuple[Arm, ...]
    rounds: int
    """How often each load is played by each arm, each time with other conversations."""
    duration_s: float
    """For how long conversations arrive, each time."""


@dataclass(slots=True)
class Seen:
    """All that one arm's clients saw of one load."""

    turns: list[Timed] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong_count: int = 0
    estimates: list[Estimated] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)
    """For each block: share of the cores that the run used, and that all used."""

    def take(self, block: str, played: Sequence[Played], model: Model) -> None:
        """Notes the turns of one block."""
        for turn in played:
            if turn.failed:
                self.failures.append(turn.answer.outcome)
                continue
            self.wrong_count += turn.wrong(model)
            name, answer = f"{block} {turn.conversation}", turn.answer
            self.turns.append(Timed(conversation=name, route=answer.route, ttft_s=answer.ttft_s))


Results = Mapping[tuple[str, str], Seen]
"""By load and arm."""

OnBlock = Callable[[str, str, Results], None]
"""Told of each block that has been played: load, arm, and all results so far."""


def run(plan: Plan, state: Path, steps: Steps, on_block: OnBlock) -> Results:
    """Plays everything. Raises LocalError when a stack cannot be started, or no turn of a block is answered."""
    results = {(load, arm.name): Seen() for load in plan.loads for arm in plan.arms}
    for cluster in dict.fromkeys(LOADS[name].cluster for name in plan.loads):
        with Stack(_stack_options(CLUSTERS[cluster], state / cluster), steps) as stack:
            arms = {arm.name: _arm(arm, stack) for arm in plan.arms}
            asyncio.run(_play(plan, cluster, stack, arms, results, on_block))
    return results


def _arm(arm: Arm, stack: Stack) -> tuple[Player, TurnLog]:
    """Starts an arm's router."""
    url = stack.add_router(_router_flags(arm))
    log = stack.process(f"router-{len(stack.routers)}").log
    return Player(url=url, model=stack.model_name), TurnLog(log)


async def _play(
    plan: Plan,
    cluster: str,
    stack: Stack,
    arms: Mapping[str, tuple[Player, TurnLog]],
    results: Results,
    on_block: OnBlock,
) -> None:
    model = Model()
    for arm, (player, log) in arms.items():
        # Engines that have never met shake hands first, which belongs to no load.
        load = _WARM_UP.conversations(f"{plan.seed} {cluster}", duration_s=_WARM_UP_S)
        await player.play(load, f"warm-up-{arm}")
        log.turns()
    pids = [stack.process(name).pid for name in stack.process_names]
    for name, number, arm in _blocks(plan, cluster):
        player, log = arms[arm]
        load = LOADS[name].conversations(f"{plan.seed} {number}", duration_s=plan.duration_s)
        meter = CpuMeter(pids)
        played = await player.play(load, f"{name}-{number}-{arm}")
        seen = results[name, arm]
        seen.cpu.append(meter.shares())
        seen.take(str(number), played, model)
        seen.estimates += log.turns()
        if not seen.turns:
            why = seen.failures[0] if seen.failures else "no conversation arrives in so short a time"
            raise LocalError(f"{name}, {arm}: no turn was answered: {why}")
        on_block(name, arm, results)


def _blocks(plan: Plan, cluster: str) -> Iterator[tuple[str, int, str]]:
    """Yields load, round and arm; who begins changes from round to round."""
    arms = [arm.name for arm in plan.arms]
    for number in range(plan.rounds):
        first = number % len(arms)
        for name in plan.loads:
            if LOADS[name].cluster == cluster:
                yield from ((name, number, arm) for arm in (*arms[first:], *arms[:first]))


def _stack_options(cluster: Cluster, state: Path) -> StackOptions:
    return StackOptions(
        state=state,
        prefill=[_engine(speed, cluster) for speed in cluster.prefill],
        decode=[_engine(speed, cluster) for speed in cluster.decode],
        routers=0,
    )


def _engine(speed: Speed, cluster: Cluster) -> SimulatedEngine:
    flags = {
        "--prefill-tokens-per-s": speed.prefill_tokens_per_s,
        "--decode-step-s": speed.decode_step_s,
        "--max-step-tokens": speed.step_tokens,
        "--block-count": speed.block_count,
        "--block-size": BLOCK_SIZE,
        "--transfer-block-s": cluster.transfer_block_s,
    }
    return SimulatedEngine(ttl_s=_TTL_S, flags=[part for flag, value in flags.items() for part in (flag, str(value))])


def _router_flags(arm: Arm) -> list[str]:
    return ["--lookup-budget-s", str(_LOOKUP_BUDGET_S), *arm.router_flags]
