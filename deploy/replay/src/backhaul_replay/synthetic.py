"""Synthetic traces, shaped like published loads. No real conversation is in them: all numbers are drawn.

Agents: sessions of a median of 43 turns, of 142,000 tokens in and 444 out per turn; nearly all gaps are tools, which
take milliseconds to tens of seconds; now and then a person thinks for minutes; a session ends without a word.
Chats: three tenants that share an engine. In an assistant people chat a few turns of hundreds to thousands of tokens, a
minute or so apart; in an office they take four minutes; programs ask once and hardly ever come back. That tenants
differ so is what studies of cloud loads report; the numbers are ours.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from backhaul_replay.trace import Conversation, Trace, Turn, of

_MOST_CONTEXT = 400_000


def agents(seed: int, *, duration_s: float = 5_400.0, sessions_per_hour: float = 240.0) -> Trace:
    """Returns sessions of coding agents that begin within ``duration_s``."""
    return _trace(random.Random(f"agents-{seed}"), duration_s, sessions_per_hour, _session)


def chats(seed: int, *, duration_s: float = 5_400.0, chats_per_hour: float = 1_800.0) -> Trace:
    """Returns chats of three tenants that begin within ``duration_s``."""
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


@dataclass(frozen=True, slots=True)
class _Tenant:
    share: float
    """Of all conversations."""
    first_tokens: int
    """Median of the first prompt."""
    gap_s: float
    """Median."""
    second: float
    """Chance of a second turn."""
    more: float
    """Chance of another one after each later turn."""


_TENANTS = {
    "assistant": _Tenant(0.4, 600, 75.0, 0.7, 0.8),
    "office": _Tenant(0.12, 1_500, 240.0, 0.6, 0.7),
    "programs": _Tenant(0.48, 1_200, 20.0, 0.03, 0.3),
}


def _chat(draw: random.Random, name: str, arrival_s: float) -> Conversation:
    (scope,) = draw.choices(list(_TENANTS), [tenant.share for tenant in _TENANTS.values()])
    tenant = _TENANTS[scope]
    conversation = Conversation()
    context = _around(draw, tenant.first_tokens, 0.9)
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
                gap_s=None if first else _around_s(draw, tenant.gap_s, 1.1),
                scope=scope,
            )
        )
        context += output + _around(draw, 80, 1.0)
        again = draw.random() < (tenant.second if first else tenant.more)
    return conversation


def _around(draw: random.Random, median: float, sigma: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(median), sigma)))


def _around_s(draw: random.Random, median: float, sigma: float) -> float:
    return round(draw.lognormvariate(math.log(median), sigma), 3)
