"""Text of an answer as it grows, and the search for stop strings in it (vLLM: ``v1/engine/detokenizer.py``)."""

from collections.abc import Sequence

from backhaul_simulator.tokens import decode


class AnswerText:
    """The text of one answer."""

    def __init__(self, *, stop: Sequence[str], include_stop: bool, min_tokens: int) -> None:
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # So many characters may turn out to be the beginning of a stop string, and are not streamed yet.
        self._held = max(map(len, stop), default=1) - 1 if not include_stop else 0
        self._given = 0
        self._tokens = 0
        self._searched = 0
        self.text = ""
        """All of it so far."""

    def add(self, token: int, *, ends: bool) -> str | None:
        """Adds a token; returns the stop string that it completes, which ends the answer.

        ``ends``: the engine stopped at this token, whose own text is left out unless stop strings are to be included.
        """
        self._tokens += 1
        if not ends or self._include_stop:
            self.text += decode(token)
        if self._tokens <= self._min_tokens:
            self._searched = len(self.text)
            return None
        return self._search()

    def delta(self, *, finished: bool) -> str:
        """Returns what is new since the last call and may be shown."""
        end = len(self.text) - (0 if finished else self._held)
        delta = self.text[self._given : max(self._given, end)]
        self._given += len(delta)
        return delta

    def _search(self) -> str | None:
        found: tuple[int, str] | None = None
        for text in self._stop:
            start = self.text.find(text, max(0, self._searched - len(text) + 1))
            if start >= 0 and (found is None or start + len(text) < found[0]):
                found = (start + len(text), text)
        self._searched = len(self.text)
        if found is None:
            return None
        end, text = found
        self.text = self.text[: end if self._include_stop else end - len(text)]
        return text
