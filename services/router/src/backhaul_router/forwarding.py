"""A turn whose decode leg somebody else sends: a gateway, which moves the bytes."""

from collections.abc import Mapping

from backhaul_router.answers import whole_answer
from backhaul_router.attempts import Attempts
from backhaul_router.core.engines import Failure
from backhaul_router.core.fresh import FreshKeys
from backhaul_router.explaining import HEADER, explanation_in_header
from backhaul_router.legs import Legs
from backhaul_router.running_turn import DecodeLeg, HandedOver, Turn


class Forwarded:
    """What to send, and what is told of it.

    It is told in this order: `taken`, `answered`, `whole` for an answer that is no stream; `left` in place of any of
    the latter. Of its bytes nothing is told here: what there is to learn of them is in the gateway's access log.
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
        self.leg = leg
        self.seen = False
        """Whether all has been told of the answer that will be, but for its end."""

    @property
    def endpoint(self) -> str:
        """host:port of the engine that it goes to."""
        return self.leg.target.node.endpoint

    @property
    def names_hosts(self) -> bool:
        """Whether the engine's answer may carry a handle: vLLM's own connector puts one into whole answers."""
        return self._handed.params is not None and not self.leg.target.reuse and not self._turn.body.stream

    def taken(self) -> None:
        """Whoever sends it has it: from now on the decode engine may be reading the hand-off."""
        self._legs.taken(self._turn)

    def answered(
        self, status: int, failure: Failure | None, *, served: str, streams: bool, whole: bool
    ) -> Mapping[str, str]:
        """The engine has answered, or failed to; returns headers for the client's answer.

        ``streams``: it is a stream of events.
        ``whole``: all of it is told, too.
        ``served``: host:port of who answered, if it is known. Of another engine nothing is learnt about this one.
        """
        turn, self.seen = self._turn, not whole
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
            self._fresh.note(turn.scope, turn.keys.own)
        explained = {} if turn.explanation is None else {HEADER: explanation_in_header(turn.explanation)}
        return {**turn.outcome.headers, **explained}

    def whole(self, body: bytes) -> bytes:
        """Returns an answer as the client gets it. Raises ApiError (502)."""
        self.seen = True
        self._turn.outcome.answer_s = self._turn.trace.elapsed_s
        return whole_answer(body, self._handed.usage)

    def left(self) -> None:
        """The client left before it was answered."""
        self._turn.outcome.result = "cancelled"

    def ended(self) -> None:
        """All of the answer has been sent, as far as anybody here knows."""
        if self._turn.labelled and self._turn.outcome.result == "ok":
            self._fresh.note(self._turn.scope, self._turn.keys.own)
