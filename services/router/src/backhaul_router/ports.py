"""What the turn code is given and gives, and whom it needs."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from opentelemetry.context import Context

from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import Reply
from backhaul_router.core.turn import Outcome


class Stream(Protocol):
    """An engine's answer of which something is there."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def complete(self) -> bool:
        """Whether the whole body has been yielded."""
        ...

    def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the body as it comes. Raises EngineError."""
        ...

    async def read(self) -> bytes:
        """Returns the body. Raises EngineError."""
        ...


class Engines(Protocol):
    """The engines' HTTP servers."""

    async def prefill(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        warm: bool,
        again: bool,
        on_sent: Callable[[], None],
        late: Callable[[Reply], None],
    ) -> Reply:
        """Sent once, ``again`` on a new connection; calls ``on_sent`` then. Raises EngineError.

        Cancelling ends it soon, at once if nothing was sent; ``late`` is called with a reply that comes nevertheless.
        """
        ...

    def decode(
        self, url: str, body: bytes, headers: Mapping[str, str], *, again: bool, on_sent: Callable[[], None]
    ) -> AbstractAsyncContextManager[Stream]:
        """Sent once, ``again`` on a new connection; calls ``on_sent`` then.

        Raises EngineError while entering; leaving early ends the leg.
        """
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator decides."""

    prefill_fallback: Literal["strict", "decode"] = "decode"
    """Without a prefill node: refuse, or let the decode engine compute the prompt."""
    keep_constraints: tuple[str, ...] = ()
    """Parts of model names whose chat template shows response formats and forced tools to the model."""
    engine_key: str = ""
    """Bearer key for the engines; empty for none."""
    explain: bool = False
    """Whether callers are told how turns are routed."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request as it came in."""

    endpoint: Endpoint
    body: bytes
    tenant: str
    """The caller, as `Turns.authenticate` names it; empty where there are no tenants."""
    session_id: str | bytes | None = None
    authorization: str | None = None
    reuse: bool = True
    """False: no lookup, and nothing kept for a next turn."""
    explain: bool = False
    """Whether the answer should say why it was served that way."""
    parent: Context | None = None
    """Trace context of the caller."""
    endpoints: frozenset[str] | None = None
    """host:port of the decode engines that may answer, where a gateway names them; None: all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a turn; valid inside the context that gave it."""

    status: int
    headers: dict[str, str]
    outcome: Outcome
    body: bytes | None
    """The whole body; None for a stream."""
    stream: Stream | None
