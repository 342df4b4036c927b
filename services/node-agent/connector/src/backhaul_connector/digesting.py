"""Shares out among requests what may be digested between two steps of the scheduler. Pure: no I/O, no clock.

Tokens are digested in the engine's own loop, where a millisecond for one request is a millisecond for all: a step
digests no more than so many tokens, and what is left waits for the next steps.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

TOKENS_PER_STEP = 12_288
"""Tokens that are digested from one step to the next at most: less than half a millisecond's."""
TOKENS_AHEAD = 2_048
"""Those of turns that go on: nobody waits for them yet, and a step shall hardly be longer for them."""
_LOOKS = 8
"""Turns that a step looks at, whether there is something to digest; the next step looks at others."""


class Work(Protocol):
    """Tokens of a request that are to be digested."""

    @property
    def done(self) -> bool:
        """Whether all that was to be digested is."""
        ...

    def advance(self, limit: int) -> int:
        """Digests at most ``limit`` further tokens; returns how many."""
        ...


class Digester:
    """What is to be digested, by request id."""

    def __init__(self, per_step: int = TOKENS_PER_STEP, ahead: int = TOKENS_AHEAD) -> None:
        self._per_step = per_step
        self._ahead = ahead
        self._left = per_step
        """Tokens that this step may still digest."""
        self._finishing: dict[str, tuple[Work, Callable[[], None]]] = {}
        self._following: OrderedDict[str, Work] = OrderedDict()

    def follow(self, request_id: str, work: Work) -> None:
        """Digests from now on what there is, ahead of need."""
        self._following[request_id] = work

    def finish(self, request_id: str, work: Work, done: Callable[[], None]) -> None:
        """Digests all that is left, and then calls ``done``: before it returns, or in a later step."""
        self._following.pop(request_id, None)
        self._finishing[request_id] = work, done
        self._finish()

    def drop(self, request_id: str) -> bool:
        """Forgets a request; tells whether it was still to be finished."""
        self._following.pop(request_id, None)
        return self._finishing.pop(request_id, None) is not None

    def finished(self, request_id: str) -> bool:
        """Goes on, as far as this step may; tells whether nothing is left of a request that was to be finished."""
        self._finish()
        return request_id not in self._finishing

    def stepped(self) -> None:
        """Goes on, as far as this step may; with the next one there is room for more."""
        self._finish()
        self._follow()
        self._left = self._per_step

    def _finish(self) -> None:
        while self._finishing:
            request_id, (work, done) = next(iter(self._finishing.items()))
            if self._left and not work.done:
                self._left -= work.advance(self._left)
            if not work.done:
                return
            del self._finishing[request_id]
            done()

    def _follow(self) -> None:
        most = min(self._ahead, self._left)
        looks = min(_LOOKS, len(self._following))
        while most and looks:
            request_id, work = next(iter(self._following.items()))
            taken = work.advance(most)
            self._left -= taken
            most -= taken
            looks -= 1
            if most:
                # Nothing is left of it for now: it is the others' turn.
                self._following.move_to_end(request_id)
