"""What is expected of a decode leg that a gateway sends: it goes with the request, and comes back with its log entry.

So any router can learn from the entry, not only the one that picked: nothing has to be remembered for it.
"""

from typing import Annotated

import msgspec

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decode leg."""

    node_id: _Name
    engine_id: _Name
    endpoint: _Name
    """host:port of the engine."""
    route: _Name
    stream: bool
    """Whether its first byte shows when the engine began: not a response's, whose stream begins before that."""
    handed_off: bool
    """Whether it was handed blocks."""
    token_count: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
    """Tokens of which it was handed the blocks, without having them; or that it computes."""
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    """Of the time to the first byte: for how much of it the engine served this leg. None: it waited for others."""
    before_s: _Seconds
    """From the client's request until it was given away."""
    estimate_s: _Seconds | None
    """From the client's request to the first byte of the answer; None where that has become void."""

    def told(self) -> str:
        """Returns it as text."""
        return msgspec.json.encode(self).decode()


def expectation_in(text: str) -> Expectation | None:
    """Returns what a text tells; None for any that `Expectation.told` did not make."""
    try:
        return msgspec.json.decode(text, type=Expectation)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
