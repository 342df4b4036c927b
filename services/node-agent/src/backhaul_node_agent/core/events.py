"""What the owner hears, and what it wants done.

Events from a connector carry the number of their connection: what an older connection still has to say is void.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from backhaul_node_agent.core.block_set import BlockSet, EngineFacts


@dataclass(frozen=True, slots=True)
class EngineConnected:
    """A connector said hello."""

    connection: int
    facts: EngineFacts
    last_session: str
    """Session of the agent that the engine was last connected to; empty for none."""


@dataclass(frozen=True, slots=True)
class WeightsKnown:
    """The connector knows the weights digest now, or why there is none."""

    connection: int
    engine_id: str
    weights_digest: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reported:
    """The engine retains a block set."""

    connection: int
    engine_id: str
    block_set: BlockSet
    deadline: float
    granted: bool = False
    """Whether an agent granted it and did not take that back."""
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class ReplayFinished:
    """Sets of the engine that were not replayed are gone."""

    connection: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class SetsFreed:
    """The engine freed these sets (or others that are not ours)."""

    connection: int
    engine_id: str
    set_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class DeadlinesConfirmed:
    """Deadlines as the engine has them, in its own clock."""

    connection: int
    engine_id: str
    deadlines: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ClockObserved:
    """A ping was answered."""

    connection: int
    engine_id: str
    sent: float
    engine_now: float
    received: float


@dataclass(frozen=True, slots=True)
class MemorySeen:
    """How many of the engine's blocks are free, and wanted, after all that its connector said before."""

    connection: int
    engine_id: str
    free_count: int
    waiting_count: int


@dataclass(frozen=True, slots=True)
class ConnectorLost:
    """The connection is closed."""

    connection: int
    engine_id: str


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine's incarnation has ended."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """The registry answered a message of the node's session."""

    valid_until: float
    """Agent's clock: time of sending plus TTL less margin."""
    joined: bool
    """Whether this is a new lease rather than the old one renewed."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The node's lease is gone."""


@dataclass(frozen=True, slots=True)
class PublisherUp:
    """Pointers of the engine reach the registry."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class PublisherDown:
    """Pointers of the engine do not reach the registry."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class PointersWritten:
    """These sets' pointers are durable."""

    engine_id: str
    set_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class PointersRemoved:
    """The removal of these sets' pointers is durable."""

    engine_id: str
    set_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Grant nothing any more, release what is not claimed."""


@dataclass(frozen=True, slots=True)
class RetentionDue:
    """Renew what is worth it and release what is not. Sent several times a second, once engines can be told."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Sent several times a second."""


Event = (
    EngineConnected
    | WeightsKnown
    | Reported
    | ReplayFinished
    | SetsFreed
    | DeadlinesConfirmed
    | ClockObserved
    | MemorySeen
    | ConnectorLost
    | EngineGone
    | LeaseHeld
    | LeaseLost
    | PublisherUp
    | PublisherDown
    | PointersWritten
    | PointersRemoved
    | DrainAsked
    | RetentionDue
    | TimePassed
)

Hear = Callable[[Event], None]
"""Where an adapter tells what happened."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the pointers of a set."""

    engine_id: str
    block_set: BlockSet


@dataclass(frozen=True, slots=True)
class Unpublish:
    """Remove the pointers of a set, and say so when that is durable."""

    engine_id: str
    block_set: BlockSet


@dataclass(frozen=True, slots=True)
class LetGo:
    """A set is retained no more, though nobody came back for it: the engine may still cache what it covers."""

    engine_id: str
    block_set: BlockSet


@dataclass(frozen=True, slots=True)
class ForgetEngine:
    """Remove all pointers of an incarnation that is gone, and drop what leads to it."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class TellClaimed:
    """Tell the connector that a set is granted."""

    engine_id: str
    set_id: str


@dataclass(frozen=True, slots=True)
class TellReturned:
    """Tell the connector that a grant was taken back."""

    engine_id: str
    set_id: str


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Tell the engine over NIXL to free a set."""

    engine_id: str
    set_id: str


class Reason(Enum):
    """Why a set is kept longer, or not."""

    RENEWED = "renewed"
    UNCONFIRMED = "renewals not confirmed"
    SURPLUS = "over budget"
    OLD = "kept long enough"
    UNPUBLISHED = "never published"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Decided:
    """Tell people what became of a set."""

    engine_id: str
    set_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class SendRenewal:
    """Ask the engine over NIXL to keep sets longer."""

    engine_id: str
    set_ids: tuple[str, ...]


Effect = Publish | Unpublish | LetGo | ForgetEngine | TellClaimed | TellReturned | SendRelease | SendRenewal | Decided
