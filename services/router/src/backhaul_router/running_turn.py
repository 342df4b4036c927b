"""One turn while it runs, and what its legs have come to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from backhaul_router.core.body import Endpoint, TurnBody
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import Grant
from backhaul_router.core.expectation import Expectation
from backhaul_router.core.kinds import text_only
from backhaul_router.core.legs import HandOff, Params
from backhaul_router.core.lookup import TurnKeys
from backhaul_router.core.nodes import Node
from backhaul_router.core.routing.demand import Demand
from backhaul_router.core.routing.planner import Plan
from backhaul_router.core.routing.target import Target
from backhaul_router.core.turn import Outcome
from backhaul_router.core.usage import PromptUsage
from backhaul_router.explaining import TurnExplanation
from backhaul_router.ports import Stream
from backhaul_router.turn_spans import LegSpan, TurnTrace
from backhaul_router.warm import Warm

_PROMPTS = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.RESPONSES: "input",
    Endpoint.MESSAGES: "messages",
}
"""Fields that hold what is said."""


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
    demand: Demand
    """What it asks of engines, as it is estimated."""
    tenant: str = ""
    """Whose turn it is; empty where there are no tenants."""
    response_id: str = ""
    """What its answer is called, where answers have names; empty while nobody is chosen to give it."""
    response_key: str = ""
    """The key by which a turn finds this one that names the response; empty while it has no name."""
    given_tokens: int = 0
    """Tokens of a prompt that came as tokens; 0 for any other."""
    plan: Plan | None = None
    """The way that it takes next; None: none was chosen, or the one that was has failed."""
    explanation: TurnExplanation | None = None
    """Why it goes that way, for who asks."""
    warm: Warm | None = None
    unused: Grant | None = None
    """A grant whose handle no engine has been sent yet."""
    labelled: bool = False
    """Whether the decode engine was told how the next turn will find this one."""
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

    @property
    def byte_count(self) -> int:
        """Text of the prompt, about."""
        return self.keys.byte_count or len(self.body.raw.get(_PROMPTS[self.body.endpoint], b""))

    @property
    def text_byte_count(self) -> int:
        """Text of a prompt that is nothing else; 0 for any other: its tokens do not go by its length."""
        return self.byte_count if not self.given_tokens and text_only(self.body) else 0

    @property
    def retains(self) -> bool:
        """Whether a next turn is to find what this one leaves."""
        return bool(self.keys.label or self.keys.previous)

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Keys that only a continuation of this turn has, once its decode leg is known."""
        return tuple(filter(None, (self.keys.own, self.response_key)))

    @property
    def demand_now(self) -> Demand:
        """What it asks for after what has failed: nothing that is held counts any more."""
        return replace(self.demand, held=None, tried=frozenset(self.tried))

    def append(self, plan: Plan, pointer: Pointer | None) -> None:
        """The holder goes on by itself."""
        self.plan = plan
        self.outcome.append(holder_id=plan.decode.key[0], origin=pointer.traceparent if pointer else "")

    def read(self, plan: Plan, warm: Warm) -> None:
        """A prefill engine reads what was granted."""
        self.plan, self.warm, self.unused = plan, warm, warm.grant
        self.outcome.warm(cached=warm.grant.cached, holder_id=warm.holder.key[0], origin=warm.origin)


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What the prefill leg came to."""

    plan: Plan
    params: Params | None = None
    """For the decode leg; None lets it compute alone."""
    alone_s: float = 0.0
    """What the decode engine is estimated to compute, seconds."""
    usage: PromptUsage | None = None
    """The prompt's token counts when the decode engine is handed its blocks."""


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """A decode leg as somebody else is to send it."""

    target: Target
    expectation: Expectation
    headers: Mapping[str, str]
    body: bytes
    span: LegSpan


@dataclass(frozen=True, slots=True)
class Delivery:
    """A decode engine's answer, of which something is there."""

    target: Target
    stream: Stream
    body: bytes | None
    """The whole of it; None for a stream of events."""
    usage: PromptUsage | None
    span: LegSpan
