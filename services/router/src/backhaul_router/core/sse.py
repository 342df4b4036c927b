"""Server-sent events, as far as the router has to know them: hardly at all, but for where lines end."""

from collections.abc import Mapping

MAX_LINE_BYTES = 64 * 1024
"""A longer line passes in pieces as it comes."""

MAX_RESPONSE_LINE_BYTES = 4 * 1024 * 1024
"""The same for `/v1/responses`, whose last event repeats what was asked and answered."""


def is_events(headers: Mapping[str, str]) -> bool:
    """Tells whether an answer is a stream of events."""
    kind = next((value for name, value in headers.items() if name.lower() == "content-type"), "")
    return kind.partition(";")[0].strip().lower() == "text/event-stream"


class WholeLines:
    """Passes a stream on line by line, so that an error event can follow at any moment.

    An event that a dead engine left unfinished would be joined with the error, or be taken for a whole one. Nothing can
    be done with an unfinished line, so holding it back costs no time.
    """

    def __init__(self, longest: int = MAX_LINE_BYTES) -> None:
        """``longest``: a line of more bytes passes in pieces."""
        self._longest = longest
        self._held = b""

    def take(self, chunk: bytes) -> bytes:
        """Returns what can be sent now; may be empty."""
        if not self._held and chunk.endswith(b"\n"):
            # As nearly every one does: engines write an event at a time.
            return chunk
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end:
            ready, self._held = self._held + chunk[:end], chunk[end:]
            return ready
        self._held += chunk
        return self.rest() if len(self._held) > self._longest else b""

    def rest(self) -> bytes:
        """Returns what is held back: the stream ended here."""
        held, self._held = self._held, b""
        return held
