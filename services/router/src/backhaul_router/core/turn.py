"""What became of a turn."""

from dataclasses import dataclass
from enum import Enum

from backhaul_connector.wire import Verdict

REUSE_OFF = {"x-backhaul-reuse": "off"}
"""Header of an answer for which nothing was looked up, and of which nothing is kept."""


class Route(Enum):
    """How a prompt was computed."""

    COLD = "cold"
    """A prefill engine computes it and hands it off; for a short prompt, or without one, the decode engine does."""
    WARM = "warm"
    """A prefill engine reads what a decode engine holds, computes the rest and hands it back."""
    APPEND = "append"
    """The decode engine that holds the conversation computes what is new."""


@dataclass(slots=True)
class Outcome:
    """What became of a turn, filled in as it goes."""

    route: Route = Route.COLD
    source: str = ""
    """What a warm turn's blocks were to their holder: `claimed` (retained) or `cached`; empty when it is cold."""
    miss: str = ""
    """Why the turn is cold; empty when it is not."""
    reuse: bool = True
    """Whether something was looked up that it could reuse, and what it leaves is kept for a next turn if it can be."""
    fallback: bool = False
    """Whether the decode engine computed the prompt because no prefill engine could."""
    handed_off: bool = False
    """Whether the decode engine was handed blocks."""
    node_id: str = ""
    """Whose engine answers, or was to."""
    holder_id: str = ""
    """The node whose blocks are reused; empty when the turn is cold."""
    origin: str = ""
    """The `traceparent` of the turn that left these; empty when it is not known."""
    estimate_s: float | None = None
    """From the request to the first piece of the answer, as it was estimated when the route was chosen, seconds."""
    repeated: bool = False
    """Whether something failed before the route was chosen that the turn took in the end."""
    prompt_token_count: int = 0
    local_token_count: int = 0
    read_token_count: int = 0
    ttft_s: float | None = None
    """From the request to the first piece of an answer that is streamed, seconds."""
    answer_s: float | None = None
    """From the request to all of an answer that is not, seconds."""
    result: str = "ok"
    """`ok`, `refused` (an engine's 4xx), `failed` (its 5xx), `broken` (it stopped in the middle); behind a gateway
    `cancelled` (it says that the client left) and `given_up` (it says nothing)."""

    def cold(self, miss: str) -> None:
        """The turn is cold, for this reason."""
        self.route, self.source, self.miss = Route.COLD, "", miss
        self.holder_id = self.origin = ""
        self.local_token_count = self.read_token_count = 0

    def warm(self, *, cached: bool, holder_id: str, origin: str) -> None:
        """A handle goes to the prefill engine."""
        self.route, self.source, self.miss = Route.WARM, "cached" if cached else "claimed", ""
        self.holder_id, self.origin = holder_id, origin

    def append(self, *, holder_id: str, origin: str) -> None:
        """The holder serves it alone."""
        self.route, self.source, self.miss = Route.APPEND, "", ""
        self.holder_id, self.origin = holder_id, origin

    def count_read(self, token_count: int) -> None:
        """Takes what the handle covers as read: a prefill engine without the connector does not say what it had."""
        self.read_token_count = token_count

    def count(self, verdict: Verdict) -> None:
        """Takes the prefill engine's token counts."""
        self.prompt_token_count = verdict.prompt
        self.local_token_count = verdict.local
        self.read_token_count = verdict.read

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that say how the turn was served."""
        headers = {
            "x-backhaul-route": self.route.value,
            "x-backhaul-prompt-tokens": str(self.prompt_token_count),
            "x-backhaul-local-tokens": str(self.local_token_count),
            "x-backhaul-read-tokens": str(self.read_token_count),
        }
        if self.source:
            headers["x-backhaul-source"] = self.source
        if self.miss:
            headers["x-backhaul-miss"] = self.miss
        if not self.reuse:
            headers |= REUSE_OFF
        if self.fallback:
            headers["x-backhaul-fallback"] = "decode"
        return headers
