"""What is compared: routers that choose each turn's route, and routers that always take the same one."""

from dataclasses import dataclass

CHOSEN = "auto"


@dataclass(frozen=True, slots=True)
class Arm:
    """A router with flags of its own."""

    name: str
    router_flags: tuple[str, ...]


def _arm(prefer: str) -> Arm:
    return Arm(prefer, ("--routes", "cold,warm,append", "--prefer", prefer))


ARMS = tuple(map(_arm, (CHOSEN, "cold", "warm", "append")))
"""A fixed policy takes its route whenever that is possible, else `cold`."""
