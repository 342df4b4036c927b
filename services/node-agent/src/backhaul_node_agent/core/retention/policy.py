"""Which retained sets are worth the blocks they hold."""

from dataclasses import dataclass
from typing import Protocol

from backhaul_node_agent.core.retention.gaps import Crowd, Gaps

LEAST_RATE = 1 / 3_600
"""Returns per second below which a set is not worth renewing, whatever is free: one in an hour of keeping."""


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

    def keeps(self, kept: Kept) -> bool:
        """Tells whether a set is worth renewing."""
        ...


class Lru:
    """The set whose turn ended last stays longest."""

    def worth(self, kept: Kept) -> float:
        """Returns the age, negated."""
        return -kept.age_s

    def keeps(self, kept: Kept) -> bool:
        """Keeps all."""
        return True


class Benefit:
    """The set that saves most prefill per block and second stays longest."""

    def __init__(self, gaps: Gaps, *, least_rate: float = LEAST_RATE) -> None:
        self._gaps = gaps
        self._least_rate = least_rate

    def worth(self, kept: Kept) -> float:
        """Returns the tokens that each block saves per second."""
        return kept.token_count * self._gaps.rate(kept.crowd, kept.age_s) / kept.block_count

    def keeps(self, kept: Kept) -> bool:
        """Keeps what returns often enough."""
        return self._gaps.rate(kept.crowd, kept.age_s) >= self._least_rate


_LRU: type[Policy] = Lru
_BENEFIT: type[Policy] = Benefit
