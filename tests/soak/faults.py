"""What can go wrong with a stack: one fault at a time, begun and ended."""

import json
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backhaul_local.stack import Stack
from tests.soak.network import BreakableNetwork

Act = Callable[[Stack], None]


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


def cut(network: BreakableNetwork, link: str, *, hold_s: float = 3.0) -> Fault:
    """Resets every connection between two parts."""
    proxy = network.link(link)
    return Fault(f"cut {link}", lambda stack: proxy.cut(), lambda stack: proxy.heal(), hold_s)


def swallow(network: BreakableNetwork, link: str, *, hold_s: float = 3.0) -> Fault:
    """Nothing passes between two parts; connections stay open."""
    proxy = network.link(link)
    return Fault(f"swallow {link}", lambda stack: proxy.swallow(), lambda stack: proxy.heal(), hold_s)


def slow(network: BreakableNetwork, link: str, *, delay_s: float = 0.2, hold_s: float = 3.0) -> Fault:
    """Everything between two parts arrives late."""
    proxy = network.link(link)

    def begin(stack: Stack) -> None:
        proxy.delay_s = delay_s

    return Fault(f"slow {link}", begin, lambda stack: proxy.heal(), hold_s)


def everything(stack: Stack, network: BreakableNetwork) -> list[Fault]:
    """Returns the faults of a random mixture: every process killed and frozen, every link cut, silent and slow."""
    faults = [make(name) for name in stack.process_names for make in (kill, freeze)]
    return faults + [make(network, link) for link in network.names for make in (cut, swallow, slow)]


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


def _again(name: str) -> Act:
    return lambda stack: stack.restart(name, wait=False)
