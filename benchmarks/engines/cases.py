"""What is played: conversations of a length, with the prefill engine's cache kept or lost, and short prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ONE_WAY = "one-way"
"""The arm that all others are compared to."""

SHIPPED = "backhaul"
"""The arm that targets are set for: a router as it is shipped, which chooses each turn's route."""

WORDS_PER_TOKEN = 0.85
"""Of the demo's text under its own tokenizer."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A router over the same engines, with flags of its own."""

    name: str
    router_flags: tuple[str, ...]
    reuse: bool = True
    """Whether decode may keep anything for the next turn."""


ARMS = (
    Arm(ONE_WAY, ("--routes", "cold", "--prefer", "cold"), reuse=False),
    Arm(SHIPPED, ()),
    Arm("warm", ("--prefer", "warm")),
)
"""One-way: prefill computes and hands off, nothing is kept, nothing comes back. Warm: what is held is always read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Conversations of one kind."""

    name: str
    history_tokens: int
    """About what the first message has."""
    reply_tokens: int
    turns: int
    lost: bool = False
    """Whether the prefill engine's prefix cache is emptied before each turn but the first."""
    repeats: int = 1
    """Conversations of each arm in a round."""
    target: float = 0.0
    """By how many times the shipped router's first token must be sooner than one-way; 0: nothing is set."""

    @property
    def document_words(self) -> int:
        """Words of the first message."""
        return max(1, round(self.history_tokens * WORDS_PER_TOKEN))

    @property
    def last_reply_tokens(self) -> int:
        """Of the last answer: no turn follows, so that its length changes nothing but the time that a run takes."""
        return min(self.reply_tokens, _LAST_REPLY)

    @property
    def first_turn(self) -> int:
        """The first turn that counts, from 0 on: in a conversation the first one has nothing to reuse."""
        return 1 if self.turns > 1 else 0


LOST_TARGET, KEPT_TARGET, NEVER_BELOW = 15.0, 2.5, 0.98
"""Lost caches from `LONG_TOKENS` of history on; kept caches; and prompts that have nothing to gain."""

LONG_TOKENS = 4000

_SHORT_TOKENS = (40, 400)
_SHORT_REPLY, _LITTLE_REPLY = 16, 32
_LAST_REPLY = 16
_REPEATS = 12


def cases(histories: Sequence[int], replies: Sequence[int], *, turns: int) -> Iterator[Case]:
    """Yields all cases, those without anything to gain first.

    A lost cache lacks all, whatever the replies were: there only the shortest ones are played, which gain least.
    """
    for tokens in _SHORT_TOKENS:
        yield Case(
            name=f"one question, {tokens}",
            history_tokens=tokens,
            reply_tokens=_SHORT_REPLY,
            turns=1,
            repeats=_REPEATS,
            target=NEVER_BELOW,
        )
    yield Case(
        name=f"kept, {min(histories)} + {_LITTLE_REPLY}",
        history_tokens=min(histories),
        reply_tokens=_LITTLE_REPLY,
        turns=max(turns, 4),
        target=NEVER_BELOW,
    )
    for reply in replies:
        for history in histories:
            if reply == min(replies):
                yield _conversation(history, reply, turns, lost=True)
            yield _conversation(history, reply, turns, lost=False)


def _conversation(history: int, reply: int, turns: int, *, lost: bool) -> Case:
    target = KEPT_TARGET if not lost else LOST_TARGET if history >= LONG_TOKENS else 0.0
    return Case(
        name=f"{'lost' if lost else 'kept'}, {history} + {reply}",
        history_tokens=history,
        reply_tokens=reply,
        turns=turns,
        lost=lost,
        target=target,
    )
