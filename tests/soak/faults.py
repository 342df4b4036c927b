"""What can go wrong with a stack: one fault at a time, begun and ended."""

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from backhaul_local.stack import Stack
from tests.soak.network import BreakableNetwork

_HAPPEN_S = 20.0

Act = Callable[[Stack], None]


class NotNowError(Exception):
    """Something that is down keeps a fault from beginning or from being mended. Mending is tried again."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a stack and is mended again."""

    name: str
    begin: Act
    end: Act
    hold_s: float
    """Seconds between the two."""


def kill(name: str, *, hold_s: float = 0.5) -> Fault:
    """SIGKILL; started again after a moment, on the same addresses and data."""
    return Fault(f"kill {name}", lambda stack: stack.kill(name), _again(name), hold_s)


def stop(name: str, *, hold_s: float = 0.5) -> Fault:
    """SIGTERM; started again after a moment."""
    return Fault(f"stop {name}", lambda stack: stack.stop(name), _again(name), hold_s)


def freeze(name: str, *, hold_s: float = 3.0) -> Fault:
    """SIGSTOP, and SIGCONT after a while."""
    return Fault(f"freeze {name}", lambda stack: stack.freeze(name), lambda stack: stack.thaw(name), hold_s)


def cut(network: BreakableNetwork, link: str, *, hold_s: float = 2.0) -> Fault:
    """Resets every connection between two parts."""
    proxy = network.link(link)
    return Fault(f"cut {link}", lambda stack: proxy.cut(), lambda stack: proxy.heal(), hold_s)


def swallow(network: BreakableNetwork, link: str, *, hold_s: float = 2.0) -> Fault:
    """Nothing passes between two parts; connections stay open."""
    proxy = network.link(link)
    return Fault(f"swallow {link}", lambda stack: proxy.swallow(), lambda stack: proxy.heal(), hold_s)


def slow(network: BreakableNetwork, link: str, *, delay_s: float = 0.2, hold_s: float = 2.0) -> Fault:
    """Everything between two parts arrives late."""
    proxy = network.link(link)

    def begin(stack: Stack) -> None:
        proxy.delay_s = delay_s

    return Fault(f"slow {link}", begin, lambda stack: proxy.heal(), hold_s)


def scripted(name: str, *steps: dict[str, Any], hold_s: float = 1.0, surely: bool = False) -> Fault:
    """A simulated engine misbehaves as ``steps`` say (`/simulator/faults`); restarted afterwards if it died of it.

    ``surely``: begin when the engine serves, and end when every step has happened; AssertionError if that takes long.
    """
    what = ", ".join(" ".join(str(value) for value in step.values() if value is not True) for step in steps)
    dies = any(step["fault"] == "die" for step in steps)

    def begin(stack: Stack) -> None:
        if surely:
            stack.wait_ready(name)
        _faults(stack, name, "POST", {"next": list(steps)})

    def end(stack: Stack) -> None:
        deadline = time.monotonic() + _HAPPEN_S
        # One that dies at the end of an answer takes the step when the answer begins.
        while surely and stack.process(name).running and (dies or _left(stack, name)):
            assert time.monotonic() < deadline, f"did not happen: {what}"
            time.sleep(0.05)
        if stack.process(name).running:
            _faults(stack, name, "DELETE")
        else:
            stack.restart(name, wait=False)

    return Fault(f"{what} at {name}", begin, end, hold_s)


def other_role(node: str, now: str, then: str, *, hold_s: float = 3.0) -> Fault:
    """A server and its agent end, and come back on the same addresses in another role; later as they were."""

    def come_back(stack: Stack, role: str) -> None:
        agent = stack.node(node).agent
        for name in (agent, node):
            stack.kill(name)
        stack.restart(node, wait=False)
        stack.restart(agent, wait=False, flags={"--role": role})

    return Fault(f"{node} as {then}", lambda stack: come_back(stack, then), lambda stack: come_back(stack, now), hold_s)


def together(name: str, *faults: Fault) -> Fault:
    """Several at once."""

    def begin(stack: Stack) -> None:
        for fault in faults:
            fault.begin(stack)

    def end(stack: Stack) -> None:
        for fault in faults:
            fault.end(stack)

    return Fault(name, begin, end, max(fault.hold_s for fault in faults))


def restarting(name: str, fault: Fault) -> Fault:
    """A process is killed and at once started again, into a fault that has begun."""

    def begin(stack: Stack) -> None:
        stack.kill(name)
        fault.begin(stack)
        stack.restart(name, wait=False)

    return Fault(f"{fault.name}, {name} restarts", begin, fault.end, fault.hold_s)


def everything(
    stack: Stack, network: BreakableNetwork, rng: Random, *, etcd: Callable[[Random], Fault] | None = None
) -> Fault:
    """Returns one fault of a random mixture: processes killed, stopped, frozen; links cut, silent, slow; slow reads.

    ``etcd`` adds what it draws.
    """
    subject = rng.choice(["process", "process", "link", "reads", *(["etcd"] if etcd else [])])
    if etcd and subject == "etcd":
        return etcd(rng)
    if subject == "process":
        return rng.choice((kill, stop, freeze))(rng.choice(stack.process_names))
    if subject == "link":
        return rng.choice((cut, swallow, slow))(network, rng.choice(network.names))
    reader = rng.choice([node.name for node in stack.nodes if node.role == "prefill"])
    return scripted(reader, {"fault": "slow_reads", "seconds_per_block": rng.choice((0.05, 1.0)), "times": 5})


def etcd_leader(endpoints: Sequence[str]) -> int:
    """Returns the position of the member that leads. Raises RuntimeError when none says so."""
    for position, endpoint in enumerate(endpoints):
        request = urllib.request.Request(f"http://{endpoint}/v3/maintenance/status", data=b"{}", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=2) as response:
                status = json.load(response)
        except OSError:
            continue
        if status.get("leader") == status["header"]["member_id"]:
            return position
    raise RuntimeError("no etcd member leads")


def _left(stack: Stack, name: str) -> list[Any]:
    """Returns the steps that have not happened; none when the engine is dying."""
    try:
        left: list[Any] = _faults(stack, name, "GET")["next"]
    except OSError:
        return []
    return left


def _faults(stack: Stack, name: str, method: str, document: dict[str, Any] | None = None) -> Any:
    url = f"{stack.node(name).url}/simulator/faults"
    data = json.dumps(document).encode() if document else None
    request = urllib.request.Request(url, data=data, method=method, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as response:
        return json.loads(response.read() or b"null")


def _again(name: str) -> Act:
    def again(stack: Stack) -> None:
        # Another fault of the same process may have started it already.
        if not stack.process(name).running:
            stack.restart(name, wait=False)

    return again
