"""Plays a load of the routing benchmark in virtual time."""

from collections.abc import Iterable

from backhaul_router.core.routing.settings import RoutingSettings
from benchmarks.routing.clusters import CLUSTERS
from benchmarks.routing.loads import Conversation, Load
from tests.fakes.virtual_engine import Content
from tests.fakes.virtual_router import ROUTES, Asked, VirtualRouter
from tests.fakes.virtual_time import Process, World

_SAID_BYTES, _ANSWERED_BYTES = 5.8, 6.9
"""Of the text of a token, on average."""

_REPORT_S = 1.0


def play(
    load: Load, *, seed: str, duration_s: float, policy: str = "auto", settings: RoutingSettings | None = None
) -> list[Asked]:
    """Plays all of a load's conversations to their end. Returns its turns in the order in which they were asked."""
    world = World()
    router = VirtualRouter(world, CLUSTERS[load.cluster], prefer=ROUTES[policy], settings=settings or RoutingSettings())
    conversations = load.conversations(seed, duration_s=duration_s)
    turns: list[Asked] = []
    running = set(conversations)
    for conversation in conversations:
        world.start(_converse(conversation, router, turns, running))
    world.start(_report(router, running))
    world.run()
    return turns


def _report(router: VirtualRouter, running: set[Conversation]) -> Process:
    while running:
        router.report()
        yield _REPORT_S


def _converse(
    conversation: Conversation, router: VirtualRouter, turns: list[Asked], running: set[Conversation]
) -> Process:
    yield conversation.arrival_s
    for asked, pause_s in _asked(conversation):
        yield pause_s
        turns.append(asked)
        yield from router.serve(asked)
    running.remove(conversation)


def _asked(conversation: Conversation) -> Iterable[tuple[Asked, float]]:
    """A chat has two tokens before each message, and one after it (`backhaul_simulator.tokens`)."""
    name, system = conversation.name, conversation.system
    token_count = shared = system.word_count + 3
    byte_count = round(system.word_count * _SAID_BYTES)
    beginnings = [(system.name, byte_count)]
    for index, turn in enumerate(conversation.turns):
        new = round(turn.says.word_count * _SAID_BYTES)
        token_count += turn.says.word_count + 3
        byte_count += new
        beginnings.insert(0, (f"{name}-asked-{index}", byte_count))
        content = Content(name, system.name, shared, token_count + 2)
        yield Asked(content, tuple(beginnings), new, turn.answer_tokens), turn.pause_s
        token_count += turn.answer_tokens + 3
        byte_count += round(turn.answer_tokens * _ANSWERED_BYTES)
        beginnings.insert(0, (f"{name}-answered-{index}", byte_count))
