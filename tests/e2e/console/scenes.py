"""Scenes for the console: clusters that do not exist, in which much happens."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from backhaul_router.core.candidates import Pointer
from backhaul_router.core.claims import HeldSet
from backhaul_router.core.console.history import KEPT
from backhaul_router.core.lookup import keys_of, session_key
from backhaul_router.core.nodes import Node, NodeState, Role
from backhaul_router.core.turn import Outcome
from tests.fakes.console import FakeConsole, ToldTurn, appended, cold, node, warm
from tests.unit.router.bodies import chat

LOCALHOST = (
    "the engine tells its peers to reach it at 'localhost', which no other machine can: "
    "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine"
)
MISSES = ("first_turn", "first_turn", "first_turn", "not_found", "not_worth", "lookup_timeout", "claim:set_claimed")
SESSION = "support-case-4711"

TICK_S = 0.25
"""Between two messages to a page: tests wait for some of them."""


def cluster(pairs: int) -> FakeConsole:
    """Returns a console of so many prefill and decode nodes, all of them well."""
    prefills = [node(f"prefill-{number}", Role.PREFILL) for number in range(1, pairs + 1)]
    return FakeConsole(*prefills, *(node(f"decode-{number}") for number in range(1, pairs + 1)), tick_s=TICK_S)


def spoil(console: FakeConsole) -> None:
    """Plants faults on some nodes."""
    for number in (3, 17, 41):
        down = "GET /health: connection refused"
        _change(console, replace(node(f"decode-{number}"), state=NodeState.NOT_READY, state_reason=down))
    for number in (5, 9):
        _change(console, node(f"prefill-{number}", Role.PREFILL, reuse=False, reuse_problem=LOCALHOST))


def _change(console: FakeConsole, changed: Node) -> None:
    if console.table.get(changed.node_id):
        console.table.change([changed], [])


class Traffic:
    """Turns and loads that come by chance, the same ones each time."""

    def __init__(self, console: FakeConsole, pairs: int) -> None:
        self._console = console
        self._pairs = pairs
        self._chance = random.Random(7)
        self._step = 0

    def load(self) -> None:
        """Has all agents tell their load."""
        self._step += 1
        for one in self._console.table:
            place = int(one.node_id.partition("-")[2])
            wave = math.sin(self._step / 15 + place) + 0.6 * math.sin(self._step / 4 + 2 * place)
            blocks = int(5000 + 2200 * wave) if one.role is Role.DECODE else 0
            self._console.load(one.node_id, blocks=blocks, running=self._chance.randrange(12), waiting=place % 3)

    def turn(self) -> None:
        """Plays one turn."""
        chance, pairs = self._chance, self._pairs
        told = ToldTurn(
            result="ok" if chance.random() > 0.02 else "broken",
            prefill=f"prefill-{chance.randint(1, pairs)}",
            decode=f"decode-{chance.randint(1, pairs)}",
            trace_id=f"{chance.getrandbits(128):032x}",
        )
        outcome = self._outcome()
        holder = f"decode-{chance.randint(1, pairs)}" if outcome.source else ""
        self._console.play(outcome, told=told, holder=holder)

    def _outcome(self) -> Outcome:
        chance = self._chance
        prompt, ttft_s = int(chance.lognormvariate(8.2, 0.9)), chance.uniform(0.08, 0.2)
        kind = chance.random()
        if kind < 0.58:
            return warm(prompt=prompt, local=int(prompt * 0.6), read=int(prompt * 0.3), ttft_s=ttft_s)
        if kind < 0.74:
            return appended(ttft_s=ttft_s)
        return cold(chance.choice(MISSES), prompt=prompt, ttft_s=ttft_s * 6)

    def past(self, samples: int = KEPT) -> None:
        """Has the last half hour be over."""
        for _ in range(samples):
            self.load()
            for _ in range(self._chance.randint(4, 14)):
                self.turn()
            self._console.state.sample()

    @asynccontextmanager
    async def flowing(self, per_s: float = 8.0) -> AsyncIterator[None]:
        """Goes on while the context lasts."""

        async def flow() -> None:
            while True:
                self.load()
                for _ in range(10):
                    if self._chance.random() < per_s / 10:
                        self.turn()
                    await asyncio.sleep(0.1)

        flowing = asyncio.create_task(flow())
        try:
            yield
        finally:
            flowing.cancel()
            await asyncio.wait([flowing])


def converse(console: FakeConsole) -> None:
    """Plays a conversation with an id, whose last turn left a block set."""
    contents: list[str] = ["hi"]
    for number in range(4):
        keys = keys_of(chat(*contents), SESSION.encode())
        tokens = 900 * (number + 1)
        outcome = warm(prompt=tokens, local=tokens // 2, read=tokens // 3) if number else cold(prompt=tokens)
        console.play(outcome, keys=keys, holder="decode-1" if number else "")
        contents += ["answer", "more"]
    key = session_key(SESSION.encode())
    console.finder.pointers = [Pointer(key, "chatcmpl-9f2c", "decode-1-engine", "decode-1", 3712, b"", 64, b"")]
    console.finder.held = [HeldSet("chatcmpl-9f2c", "decode-1-engine", "held", 3712, 232, 391.0)]
