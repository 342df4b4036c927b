"""Random conversations as clients have them: continued, edited, forked, submitted twice, titled, cut, with choices."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]

_OPENINGS = 40
_MAX_MESSAGES = 24
_KINDS = {"next": 67, "edit": 8, "fork": 8, "double": 8, "title": 3, "cut": 3, "choices": 3}
"""What clients do, in percent."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One turn to send; turns that are planned together are sent together."""

    kind: str
    messages: list[Message]
    max_tokens: int
    stream: bool
    session_id: str
    cache_salt: str
    choices: int = 1
    """Answers that are asked for (``n``); more than one is served by the decode engine alone."""
    leave_early: bool = False
    """Whether the client closes the connection in the middle of the answer."""
    goes_on: bool = True
    """Whether the conversation continues from this turn."""


@dataclass(slots=True)
class Conversation:
    """One conversation; everything random in it comes from ``rng``."""

    rng: Random
    name: str
    messages: list[Message] = field(default_factory=list)
    session_id: str = ""
    cache_salt: str = ""
    turn_count: int = 0

    def __post_init__(self) -> None:
        opening = self.rng.randrange(_OPENINGS)
        self.messages = [{"role": "system", "content": _words(Random(opening), 40, 160)}]
        self.session_id = f"session-{self.name}" if self.rng.random() < 0.3 else ""
        self.cache_salt = self.rng.choice(["", "", "red", "blue"])
        self.turn_count = 2 + min(10, int(self.rng.expovariate(0.25)))

    @property
    def over(self) -> bool:
        """Whether the client has nothing more to ask."""
        return self.turn_count <= 0 or len(self.messages) > _MAX_MESSAGES

    def plan(self) -> list[Planned]:
        """Returns the turns to send now."""
        self.turn_count -= 1
        kind = self._kind()
        if kind == "edit":
            self._edit()
        elif kind == "cut":
            del self.messages[1:3]
        if kind == "title":
            ask = {"role": "user", "content": f"title {_words(self.rng, 3, 6)}"}
            return [self._planned(kind, [*self.messages[-2:], ask], goes_on=False)]
        asked = [*self.messages, self._question()]
        if kind == "fork":
            other = [*self.messages, self._question()]
            return [self._planned(kind, asked), self._planned(kind, other, goes_on=False)]
        if kind == "choices":
            return [self._planned(kind, asked, choices=2)]
        turn = self._planned(kind, asked, leave_early=kind == "next" and self.rng.random() < 0.02)
        return [turn, turn] if kind == "double" else [turn]

    def answered(self, turn: Planned, text: str) -> None:
        """Takes the answer that the conversation goes on from."""
        self.messages = [*turn.messages, {"role": "assistant", "content": text}]

    def _kind(self) -> str:
        if len(self.messages) < 4:
            return self.rng.choice(["next", "next", "next", "double"])
        return self.rng.choices(list(_KINDS), list(_KINDS.values()))[0]

    def _edit(self) -> None:
        self.messages = copy.deepcopy(self.messages)
        index = self.rng.randrange(1, len(self.messages))
        self.messages[index]["content"] = _words(self.rng, 5, 40)

    def _question(self) -> Message:
        return {"role": "user", "content": _words(self.rng, 10, 60)}

    def _planned(
        self,
        kind: str,
        messages: Sequence[Message],
        *,
        choices: int = 1,
        leave_early: bool = False,
        goes_on: bool = True,
    ) -> Planned:
        return Planned(
            kind=kind,
            messages=list(messages),
            max_tokens=self.rng.randint(4, 24),
            stream=self.rng.random() < 0.8,
            session_id=self.session_id,
            cache_salt=self.cache_salt,
            choices=choices,
            leave_early=leave_early,
            goes_on=goes_on,
        )


def _words(rng: Random, least: int, most: int) -> str:
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(rng.randint(least, most)))
