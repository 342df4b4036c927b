"""Whether clocks can be relied on: engines' own, by which deadlines are counted, and the time of day."""

from collections.abc import Iterator

from backhaul_cli.core.finding import Finding, error, warning
from backhaul_cli.core.snapshot import Clock, EngineSetup, Snapshot

SKEW_S = 2.0
"""Times of day that differ by less are equal."""
_STEADY = (
    "See that the machine is not suspended or migrated while it serves, and that its kernel has a stable clock source "
    "(/sys/devices/system/clocksource/clocksource0/current_clocksource); then restart vLLM."
)


def engine_clocks(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds engines whose clock jumps, or runs faster or slower than clocks do."""
    for node in snapshot.nodes or ():
        agent = snapshot.agents.get(node.node_id)
        for setup in agent.engines.values() if agent is not None else ():
            if setup.connected and not setup.clock_known:
                yield _skewed(node.node_id, setup) if setup.clock_jump_count else _unknown(node.node_id)
            elif setup.connected and setup.clock_jump_count:
                yield _jumped(node.node_id, setup)


def _skewed(node_id: str, setup: EngineSetup) -> Finding:
    return error(
        "clock-skew",
        node_id,
        f"The engine's clock does not run like its agent's ({_times(setup)}): deadlines cannot be counted on, and "
        "nothing that it holds is granted until it runs evenly.",
        _STEADY,
    )


def _jumped(node_id: str, setup: EngineSetup) -> Finding:
    return warning(
        "clock-jumped",
        node_id,
        f"The engine's clock runs evenly now, and has not always ({_times(setup)}): engines that knew it before read "
        "no blocks of it until it restarts.",
        _STEADY,
    )


def _unknown(node_id: str) -> Finding:
    return warning(
        "engine-clock-unknown",
        node_id,
        "The engine's clock is not known yet, so nothing that it holds is granted.",
        "Ask again in a moment. If it stays so, the engine is too busy to answer its agent's pings.",
    )


def _times(setup: EngineSetup) -> str:
    return "it has jumped once" if setup.clock_jump_count == 1 else f"it has jumped {setup.clock_jump_count} times"


def times_of_day(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds services whose time of day is not that of the others."""
    told = {f"registry {registry.address}": registry.clock for registry in snapshot.registries}
    told |= {node_id: agent.clock for node_id, agent in snapshot.agents.items()}
    known = {subject: clock for subject, clock in told.items() if clock is not None}
    usual_s = _middle([clock.ahead_s for clock in known.values()])
    for subject, clock in known.items():
        if abs(clock.ahead_s - usual_s) > SKEW_S + clock.uncertainty_s:
            yield _skew(subject, clock, usual_s)
    if abs(usual_s) > SKEW_S + max((clock.uncertainty_s for clock in known.values()), default=0.0):
        yield warning(
            "time-of-day-skew",
            "this machine",
            f"This machine's clock is {abs(usual_s):.1f} s {'behind' if usual_s > 0 else 'ahead of'} the services'.",
            "Synchronise it (chrony, systemd-timesyncd).",
        )


def _skew(subject: str, clock: Clock, usual_s: float) -> Finding:
    ahead_s = clock.ahead_s - usual_s
    return warning(
        "time-of-day-skew",
        subject,
        f"Its time of day is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the others': certificates "
        "and tokens count as expired or not yet valid there, and traces and logs do not line up.",
        "Synchronise its machine's clock (chrony, systemd-timesyncd).",
    )


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
