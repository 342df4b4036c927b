"""One turn while it runs, and what its legs have come to."""

from dataclasses import dataclass, field

from backhaul_router.core.body import TurnBody
from backhaul_router.core.claims import Grant
from backhaul_router.core.legs import HandOff, Params
from backhaul_router.core.lookup import TurnKeys
from backhaul_router.core.nodes import Node
from backhaul_router.core.picking import Pair
from backhaul_router.core.turn import Outcome
from backhaul_router.core.usage import PromptUsage
from backhaul_router.observing import TurnTrace
from backhaul_router.ports import Stream
from backhaul_router.warm import Warm


@dataclass(slots=True)
class Turn:
    """One turn while it runs."""

    body: TurnBody
    alone: bool
    """Whether the decode engine must serve it without a prefill leg."""
    scope: str
    cache_salt: str
    keys: TurnKeys
    engine_headers: dict[str, str]
    outcome: Outcome
    trace: TurnTrace
    warm: Warm | None = None
    unused: Grant | None = None
    """A grant whose handle no engine has been sent yet."""
    untold: tuple[Node, HandOff] | None = None
    """A hand-off of which no decode engine has been sent anything."""
    prefilled_s: float = 0.0
    """When the prefill engine answered, seconds after the turn began."""
    tried: set[str] = field(default_factory=set)
    """Nodes that failed this turn."""
    unread: list[tuple[Node, Node]] = field(default_factory=list)
    """Reader and source of reads that seem to have failed. Whether the pair is to blame, a repetition shows."""

    @property
    def path(self) -> str:
        """Of both legs."""
        return self.body.endpoint.value


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What the prefill leg came to."""

    pair: Pair
    params: Params | None = None
    """For the decode leg; None lets it compute alone."""
    usage: PromptUsage | None = None
    """The prompt's token counts when the decode engine is handed its blocks."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A decode engine's answer, of which something is there."""

    node: Node
    stream: Stream
    body: bytes | None
    """The whole of it; None for a stream of events."""
    usage: PromptUsage | None
