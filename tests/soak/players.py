"""Plays conversations against routers and checks every text against the model's."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import aiohttp

from backhaul_simulator import tokens
from backhaul_simulator.model import Model
from tests.soak.client import REFUSED, Answer, Client
from tests.soak.histories import Conversation, Planned
from tests.soak.tally import Tally

OnTurn = Callable[[Planned, Answer], None]


class Players:
    """Some conversations at a time, until a number of turns has begun. Only timing is left to chance."""

    def __init__(
        self,
        *,
        routers: Sequence[str],
        model: str,
        seed: int,
        turn_count: int,
        concurrency: int,
        limit_s: float = 120.0,
        pause_s: float = 0.0,
        on_turn: OnTurn = lambda turn, answer: None,
    ) -> None:
        """After ``limit_s`` seconds a turn counts as hung; ``pause_s`` is what a client waits after each turn."""
        self.tally = Tally()
        self._routers = routers
        self._model = model
        self._seed = seed
        self._turn_count = turn_count
        self._concurrency = concurrency
        self._limit_s = limit_s
        self._pause_s = pause_s
        self._on_turn = on_turn
        self._oracle = Model()
        self._begun = 0

    async def run(self) -> Tally:
        """Plays; returns the counts."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            client = Client(session, model=self._model, limit_s=self._limit_s)
            async with asyncio.TaskGroup() as group:
                for number in range(self._concurrency):
                    group.create_task(self._player(client, number))
        return self.tally

    def stop(self) -> None:
        """Ends the run after the turns that are under way."""
        self._turn_count = 0

    async def _player(self, client: Client, number: int) -> None:
        rng = Random(f"{self._seed}-{number}")
        count = 0
        while self._begun < self._turn_count:
            count += 1
            conversation = Conversation(rng, f"{self._seed}-{number}-{count}")
            while not conversation.over and self._begun < self._turn_count:
                await self._turns(client, conversation, rng)

    async def _turns(self, client: Client, conversation: Conversation, rng: Random) -> None:
        planned = conversation.plan()
        self._begun += len(planned)
        orders = [rng.sample(self._routers, len(self._routers)) for _ in planned]
        answers = await asyncio.gather(
            *(self._send(client, order, turn) for order, turn in zip(orders, planned, strict=True))
        )
        for turn, answer in zip(planned, answers, strict=True):
            self._check(turn, answer)
        if planned[0].goes_on and answers[0].outcome == "answered":
            conversation.answered(planned[0], answers[0].text)
        await asyncio.sleep(self._pause_s)

    async def _send(self, client: Client, routers: Sequence[str], turn: Planned) -> Answer:
        """Goes to the next router when one refuses the connection, as a load balancer does."""
        answer = Answer(REFUSED)
        for url in routers:
            answer = await client.send(url, turn)
            if answer.outcome != REFUSED:
                break
        return answer

    def _check(self, turn: Planned, answer: Answer) -> None:
        self.tally.add(turn, answer)
        expected = self._expected(turn)
        right = answer.text == expected if answer.outcome == "answered" else expected.startswith(answer.text)
        if not right:
            self.tally.add_wrong(turn, answer, expected)
        self._on_turn(turn, answer)

    def _expected(self, turn: Planned) -> str:
        answer = self._oracle.answer(tokens.encode_chat(turn.messages), max_tokens=turn.max_tokens)
        return "".join(tokens.decode(token) for token in answer)
