"""Synthetic traces, shaped like published loads. No real conversation is in them: all numbers are drawn.

Agents: sessions of a median of 43 turns, of 142,000 tokens in and 444 out per turn; nearly all gaps are tools, which
take milliseconds to tens of seconds; now and then a person thinks for minutes; a session ends without a word.
Chats: a few turns of hundreds to thousands of tokens, minutes apart; many people never come back.
"""

import math
import random
from collections.abc import Callable

from backhaul_replay.trace import Conversation, Trace, Turn, of

_MOST_CONTEXT = 400_000


def agents(seed: int, *, duration_s: float = 7_200.0, sessions_per_hour: float = 60.0) -> Trace:
    """Returns sessions of coding agents that begin within ``duration_s``."""
    return _trace(random.Random(f"agents-{seed}"), duration_s, sessions_per_hour, _session)


def chats(seed: int, *, duration_s: float = 7_200.0, chats_per_hour: float = 600.0) -> Trace:
    """Returns chats of people that begin within ``duration_s``."""
    return _trace(random.Random(f"chats-{seed}"), duration_s, chats_per_hour, _chat)


SHAPES: dict[str, Callable[[int], Trace]] = {"agents": agents, "chats": chats}


def _trace(
    draw: random.Random,
    duration_s: float,
    per_hour: float,
    make: Callable[[random.Random, str, float], Conversation],
) -> Trace:
    conversations: list[Conversation] = []
    arrival_s = draw.expovariate(per_hour / 3_600)
    while arrival_s < duration_s:
        conversations.append(make(draw, f"c{len(conversations)}", round(arrival_s, 3)))
        arrival_s += draw.expovariate(per_hour / 3_600)
    return of(conversations)


def _session(draw: random.Random, name: str, arrival_s: float) -> Conversation:
    conversation = Conversation()
    context = _around(draw, 40_000, 0.4)
    growth = _around(draw, 3_100, 0.4)
    for index in range(_around(draw, 43, 0.7)):
        output = _around(draw, 444, 0.9)
        gap_s = _around_s(draw, 1.5, 1.5) if draw.random() < 0.92 else _around_s(draw, 120, 1.1)
        conversation.turns.append(
            Turn(
                conversation=name,
                prompt_tokens=context,
                output_tokens=output,
                arrival_s=None if index else arrival_s,
                gap_s=gap_s if index else None,
                scope="agents",
            )
        )
        context += output + _around(draw, growth, 0.8)
        if context > _MOST_CONTEXT:
            break
    return conversation


def _chat(draw: random.Random, name: str, arrival_s: float) -> Conversation:
    conversation = Conversation()
    context = _around(draw, 600, 0.9)
    again = True
    while again:
        output = _around(draw, 300, 0.7)
        first = not conversation.turns
        conversation.turns.append(
            Turn(
                conversation=name,
                prompt_tokens=context,
                output_tokens=output,
                arrival_s=arrival_s if first else None,
                gap_s=None if first else _around_s(draw, 75, 1.1),
                scope="chats",
            )
        )
        context += output + _around(draw, 80, 1.0)
        again = draw.random() < (0.6 if first else 0.75)
    return conversation


def _around(draw: random.Random, median: float, sigma: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(median), sigma)))


def _around_s(draw: random.Random, median: float, sigma: float) -> float:
    return round(draw.lognormvariate(math.log(median), sigma), 3)
