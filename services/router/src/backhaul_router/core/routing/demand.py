"""What a turn asks of engines, as far as it is known without its tokens."""

from dataclasses import dataclass
from enum import Enum

from backhaul_router.core.nodes import Node
from backhaul_router.core.routing.target import Target


class Leg(Enum):
    """What an engine has to do for a turn."""

    PREFILL = "prefill"
    """Compute the prompt, but for what it has cached, and hand it off."""
    READ = "read"
    """Read what the holder holds, compute the rest, hand it off."""
    DECODE = "decode"
    """Take a hand-off, and answer."""
    ALONE = "alone"
    """Compute the prompt, but for what it holds or has cached, and answer."""

    # They key what every turn looks up, and there is one of each: an enumeration's own hash is a function in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning of a prompt that an engine may have cached from an earlier one."""

    key: str
    token_count: int
    """Estimated."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a decode engine retains of the conversation."""

    holder: Target
    token_count: int
    proved: bool = False
    """Whether the conversation is known to be the same up to its last answer, not only by its name."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a turn asks for."""

    model: str
    """Model or adapter."""
    token_count: int
    """Tokens of the prompt, estimated."""
    prefixes: tuple[Prefix, ...] = ()
    """Longest first; the first is all of the prompt."""
    held: Held | None = None
    tried: frozenset[str] = frozenset()
    """Nodes (ids) that failed this turn."""
    partners: tuple[Target, ...] = ()
    """Engines of the other role with which blocks are to be exchanged: any one of them will do. For a leg with a known
    partner only that one."""
    endpoints: frozenset[str] | None = None
    """host:port of the engines that may answer, where a gateway names them; None: all."""

    def with_partners(self, *partners: Target) -> "Demand":
        """Returns the same demand of a leg that exchanges blocks with one of these."""
        return Demand(self.model, self.token_count, self.prefixes, self.held, self.tried, partners, self.endpoints)

    def admits(self, decode: Node) -> bool:
        """Tells whether a decode node may answer."""
        return self.endpoints is None or decode.endpoint in self.endpoints

    def held_by(self, target: Target) -> int:
        """Returns the tokens of the prompt that an engine holds for certain; 0 for all but the holder."""
        return self.held_tokens if self.held and self.held.holder.key == target.key else 0

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompt that the holder has; 0 without one."""
        return min(self.held.token_count, self.token_count) if self.held else 0
