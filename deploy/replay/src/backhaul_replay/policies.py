"""What is compared: how long each policy pins a turn's blocks, and which it gives up first."""

from collections.abc import Callable
from dataclasses import dataclass

from backhaul_node_agent.core.retention.gaps import Gaps
from backhaul_node_agent.core.retention.policy import Benefit, Kept, Lru, Policy

FIXED_TTL_S = 480.0
"""vLLM's ``decoder_kv_blocks_ttl``."""


class Oldest:
    """What was pinned first stays: a new set is refused when all is full."""

    def worth(self, kept: Kept) -> float:
        """Returns the age."""
        return kept.age_s


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to retain."""

    name: str
    make: Callable[[Gaps], Policy]
    max_retention_s: float
    budget: bool = True
    """Whether the agent's budget holds; without, everything is pinned, whoever waits."""
    second_chance: bool = False
    """Whether what is no longer pinned may be found in the engine's prefix cache."""


def contenders(max_retention_s: float) -> list[Contender]:
    """Returns all that are compared. Raises ValueError when nothing could be kept."""
    if not max_retention_s > 0:
        raise ValueError(f"max_retention_s must be more than 0, got {max_retention_s}")
    return [
        Contender("fixed 480 s, no limit", lambda _: Oldest(), FIXED_TTL_S, budget=False),
        Contender("fixed 480 s", lambda _: Oldest(), FIXED_TTL_S),
        Contender("lru", lambda _: Lru(), max_retention_s),
        Contender("benefit", Benefit, max_retention_s),
        Contender("lru + cached", lambda _: Lru(), max_retention_s, second_chance=True),
        Contender("benefit + cached", Benefit, max_retention_s, second_chance=True),
    ]
