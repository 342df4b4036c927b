"""The loads: conversations with all their sizes and times, drawn from a seed. Nothing else in a run is random.

Sizes are words, and a word is a token of the engine simulator. Everything is smaller and faster than life, so that a
few hundred turns fit into a minute: chats of hundreds of tokens, agents of thousands, documents of up to ten thousand,
people who think for a second.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

WORDS = 5000
"""Different words of a text."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, named by what it is drawn from: passages of one name begin alike."""

    name: str
    word_count: int

    @property
    def text(self) -> str:
        """The words themselves."""
        draw = Random(self.name)
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(self.word_count))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client says, and what it wants to hear."""

    says: Passage
    answer_tokens: int
    pause_s: float
    """From the end of the answer before; 0 for a first turn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A client that asks again and again, each time with all that was said."""

    name: str
    kind: str
    arrival_s: float
    """Since the beginning of the load."""
    system: Passage
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Conversations of a kind. Sizes and times are medians of lognormal distributions, with their sigma."""

    systems: tuple[int, ...]
    """Words of each system prompt; a conversation has one of them, and so shares its beginning with others."""
    first: tuple[float, float]
    """Words of the first thing that is said."""
    later: tuple[float, float]
    """Words of what is said in a later turn."""
    pasted: tuple[float, float] = (0.0, 0.0)
    """Words of what is put to some later turns."""
    pasted_share: float = 0.0
    """Share of later turns that are so."""
    answer: tuple[float, float]
    """Tokens of an answer."""
    pause_s: tuple[float, float]
    turns: tuple[int, int]
    """Least and most turns."""
    longest: int = 9_000
    """Most words of anything that is said."""


CHAT = Kind(
    systems=(150, 220, 300, 180),
    first=(90, 0.9),
    later=(45, 0.8),
    answer=(55, 0.5),
    pause_s=(0.8, 0.6),
    turns=(3, 9),
)
"""People talk with an assistant, in short sentences."""

AGENT = Kind(
    systems=(1_700, 2_300),
    first=(120, 0.7),
    later=(240, 1.0),
    answer=(28, 0.4),
    pause_s=(0.15, 0.8),
    turns=(7, 14),
    longest=3_500,
)
"""Programs call tools, whose output is a few hundred tokens, sometimes a few thousand, and comes soon."""

DOCUMENT = Kind(
    systems=(120,),
    first=(4_800, 0.35),
    later=(35, 0.6),
    pasted=(2_200, 0.4),
    pasted_share=0.25,
    answer=(60, 0.4),
    pause_s=(0.9, 0.5),
    turns=(3, 6),
)
"""People ask about a long text, and now and then bring another one."""

KINDS: Mapping[str, Kind] = {"chat": CHAT, "agent": AGENT, "document": DOCUMENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Conversations that arrive by chance, each kind at its own rate."""

    name: str
    per_s: Mapping[str, float]
    """Conversations per second, by kind."""
    cluster: str = "even"
    """Name of the engines that it is played on."""

    def conversations(self, seed: str, *, duration_s: float) -> tuple[Conversation, ...]:
        """Returns those that arrive within ``duration_s`` seconds, in their order; equal seeds give equal ones."""
        drawn = (
            conversation
            for kind, per_s in self.per_s.items()
            for conversation in _of_kind(Random(f"{seed} {self.name} {kind}"), kind, per_s, duration_s)
        )
        return tuple(sorted(drawn, key=lambda conversation: conversation.arrival_s))


_MIXED = {"chat": 0.5, "agent": 0.2, "document": 0.14}

LOADS: Mapping[str, Load] = {
    load.name: load
    for load in (
        Load(name="chat", per_s={"chat": 1.4}),
        Load(name="agents", per_s={"agent": 0.55}),
        Load(name="documents", per_s={"document": 0.36}),
        Load(name="mixed", per_s=_MIXED),
        Load(name="slow-prefill", per_s=_MIXED, cluster="slow-prefill"),
        Load(name="slow-decode", per_s=_MIXED, cluster="slow-decode"),
        Load(name="slow-transfer", per_s=_MIXED, cluster="slow-transfer"),
    )
}


def _of_kind(draw: Random, kind: str, per_s: float, duration_s: float) -> Iterator[Conversation]:
    arrival_s, number = draw.expovariate(per_s), 0
    while arrival_s < duration_s:
        number += 1
        yield _conversation(draw, kind, f"{kind}-{number}", arrival_s)
        arrival_s += draw.expovariate(per_s)


def _conversation(draw: Random, kind: str, name: str, arrival_s: float) -> Conversation:
    shape = KINDS[kind]
    which = draw.randrange(len(shape.systems))
    text = f"{draw.getrandbits(64):016x}"
    turns = tuple(
        _turn(draw, shape, Passage(f"{text}-{index}", 0), first=not index)
        for index in range(draw.randint(*shape.turns))
    )
    return Conversation(name, kind, arrival_s, Passage(f"{kind}-{which}", shape.systems[which]), turns)


def _turn(draw: Random, shape: Kind, says: Passage, *, first: bool) -> Turn:
    words = _whole(draw, shape.first if first else shape.later)
    if not first and draw.random() < shape.pasted_share:
        words += _whole(draw, shape.pasted)
    return Turn(
        says=Passage(says.name, min(words, shape.longest)),
        answer_tokens=max(4, _whole(draw, shape.answer)),
        pause_s=0.0 if first else round(_around(draw, shape.pause_s), 3),
    )


def _whole(draw: Random, median: tuple[float, float]) -> int:
    return max(1, round(_around(draw, median)))


def _around(draw: Random, median: tuple[float, float]) -> float:
    middle, sigma = median
    return draw.lognormvariate(math.log(middle), sigma)
