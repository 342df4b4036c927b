"""A turn whose decode leg somebody else sends: a gateway, which moves the bytes."""

from collections.abc import Mapping

from backhaul_router.answers import turn_answer
from backhaul_router.attempts import Attempts
from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import UNANSWERED, Failure
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.core.turn import Outcome
from backhaul_router.explaining import HEADER, explanation_in_header
from backhaul_router.legs import Legs
from backhaul_router.running_turn import DecodeLeg, HandedOver, Turn


class Forwarded:
    """What to send, and what is told of it.

    It is told in this order: `taken`, `answered`, `whole` for an answer that is no stream, `ended`; `left` in place of
    any after `taken`, `broken` in place of `ended`, `given_up` in place of any. Who sees the bytes of a stream tells
    when they `began`; of others' bytes nothing is told here: what there is to learn is in the gateway's access log.
    """

    def __init__(
        self, turn: Turn, handed: HandedOver, leg: DecodeLeg, *, legs: Legs, attempts: Attempts, fresh: FreshKeys
    ) -> None:
        self._turn = turn
        self._handed = handed
        self._legs = legs
        self._attempts = attempts
        self._fresh = fresh
        self._untold = turn.untold
        self._taken_s = 0.0
        """When it was taken, seconds after the turn began."""
        self._status = 0
        """Of the answer."""
        self.leg = leg
        self.seen = False
        """Whether all has been told of the answer that will be, but for its end."""

    @property
    def endpoint(self) -> str:
        """host:port of the engine that it goes to."""
        return self.leg.target.node.endpoint

    @property
    def served(self) -> Outcome:
        """How the turn is served."""
        return self._turn.outcome

    @property
    def url(self) -> str:
        """Of the request that it is."""
        return f"{self.leg.target.node.engine_url}{self._turn.path}"

    @property
    def asks_for_stream(self) -> bool:
        """Whether the client wants a stream of events."""
        return self._turn.body.stream

    @property
    def names_hosts(self) -> bool:
        """Whether the engine's answer may carry a handle: vLLM's own connector puts one into whole answers."""
        return self._hands_back and not self._turn.body.stream

    @property
    def streams_hosts(self) -> bool:
        """Whether an answer that is streamed may carry one: that of `/v1/responses` repeats all in its last event."""
        return self._hands_back and self._turn.body.stream and self._turn.body.endpoint is Endpoint.RESPONSES

    @property
    def _hands_back(self) -> bool:
        return self._handed.params is not None and not self.leg.target.reuse

    def told(self, step: str) -> None:
        """Who sends it tells how it goes, by a call of its own."""
        self._turn.trace.told(step)

    def taken(self) -> None:
        """Whoever sends it has it: from now on the decode engine may be reading the hand-off."""
        self._taken_s = self._turn.trace.elapsed_s
        self._legs.taken(self._turn)

    def answered(
        self, status: int, failure: Failure | None, *, served: str, streams: bool, whole: bool
    ) -> Mapping[str, str]:
        """The engine has answered, or failed to; returns headers for the client's answer.

        ``streams``: it is a stream of events. ``whole``: all of it is told, too.
        ``served``: host:port of who answered, if it is known. Of another engine nothing is learnt about this one.
        """
        turn, self.seen, self._status = self._turn, not whole, status
        if failure is not None and failure in UNANSWERED:
            self.leg.span.failed(failure.value)
        else:
            self.leg.span.answered(status)
        if served in ("", self.endpoint):
            self._attempts.sent_elsewhere(turn, self._handed, failure)
            if streams:
                self._legs.streams_elsewhere(turn, self.leg.target)
        if failure is Failure.REFUSED:
            # No connection: nothing was sent, so nobody reads the hand-off.
            turn.untold = self._untold
        if status >= 400:
            turn.outcome.result = "refused" if status < 500 else "failed"
        elif turn.labelled:
            # The next turn may come before this one is seen to have ended.
            self._note()
        explained = {} if turn.explanation is None else {HEADER: explanation_in_header(turn.explanation)}
        return {**turn.outcome.headers, **explained}

    def whole(self, body: bytes) -> bytes:
        """Returns an answer as the client gets it. Raises ApiError (502)."""
        self.seen = True
        self._turn.outcome.answer_s = self._turn.trace.elapsed_s
        return turn_answer(self._turn.body, self._status, body, self._handed.usage)

    def began(self, first_s: float) -> None:
        """The first byte of a stream came this many seconds after it was sent."""
        if self.leg.expectation.stream:
            self._legs.began_elsewhere(self.leg, first_s=first_s)
            self._turn.outcome.ttft_s = self._taken_s + first_s

    def broken(self) -> None:
        """The engine stopped in the middle of its answer."""
        self._turn.outcome.result = "broken"
        self.leg.span.failed(Failure.DISCONNECTED.value)
        self._attempts.sent_elsewhere(self._turn, self._handed, Failure.DISCONNECTED)
        self._forget()

    def given_up(self) -> None:
        """Nobody tells any more how it goes."""
        self._turn.outcome.result = "given_up"
        self.leg.span.failed("given_up")

    def left(self) -> None:
        """The client left before all of the answer was there."""
        self._turn.outcome.result = "cancelled"
        self.leg.span.failed("cancelled")
        self._forget()

    def ended(self) -> None:
        """All of the answer has been sent, as far as anybody here knows."""
        if self._turn.labelled and self._turn.outcome.result == "ok":
            self._note()

    def _note(self) -> None:
        for key in self._turn.own_keys:
            self._fresh.note(self._turn.scope, key)

    def _forget(self) -> None:
        for key in self._turn.own_keys:
            self._fresh.forget(self._turn.scope, key)
