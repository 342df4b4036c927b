"""Which retained sets are worth the blocks they hold."""

from dataclasses import dataclass
from typing import Protocol

from backhaul_node_agent.core.retention.gaps import Crowd, Gaps


@dataclass(frozen=True, slots=True)
class Kept:
    """What a policy sees of a set that may be released."""

    set_id: str
    crowd: Crowd
    token_count: int
    """Tokens that a return would save."""
    block_count: int
    """Blocks that its release alone would free, at least 1."""
    age_s: float
    """Time since its turn ended."""


class Policy(Protocol):
    """Ranks retained sets; has no state of its own but what it learns from."""

    def worth(self, kept: Kept) -> float:
        """Returns what keeping a set is worth; of two sets the greater one stays longer."""
        ...


class Lru:
    """The set whose turn ended last stays longest."""

    def worth(self, kept: Kept) -> float:
        """Returns the age, negated."""
        return -kept.age_s


class Benefit:
    """The set that saves most prefill per block and second stays longest."""

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps

    def worth(self, kept: Kept) -> float:
        """Returns the tokens that each block saves per second."""
        return kept.token_count * self._gaps.rate(kept.crowd, kept.age_s) / kept.block_count


_LRU: type[Policy] = Lru
_BENEFIT: type[Policy] = Benefit
