"""Plays conversations against a router, each at its own pace, and notes what its client saw."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from backhaul_simulator import tokens
from backhaul_simulator.model import Model
from benchmarks.routing.client import Answer, Client, Message
from benchmarks.routing.loads import Conversation, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One turn that was played."""

    conversation: str
    kind: str
    index: int
    """Of the turn in its conversation, from 0 on."""
    messages: tuple[Message, ...]
    answer_tokens: int
    answer: Answer

    @property
    def failed(self) -> bool:
        """Whether there is no whole answer."""
        return self.answer.outcome != "answered"

    def wrong(self, model: Model) -> bool:
        """Tells whether the text is another one than the model's own."""
        prompt = tokens.encode_chat(self.messages)
        right = model.answer(prompt, max_tokens=self.answer_tokens, min_tokens=self.answer_tokens)
        return self.answer.text != "".join(map(tokens.decode, right))


class Player:
    """Plays loads, one after the other, against one router."""

    def __init__(self, *, url: str, model: str) -> None:
        self._url = url
        self._model = model

    async def play(self, load: Sequence[Conversation], block: str) -> list[Played]:
        """Plays all of a load's conversations to their end, then says that they are over.

        ``block`` is the name of this time. It keeps caches apart: nothing that engines have cached of others is of use.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
            client = Client(session, url=self._url, model=self._model, cache_salt=block)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_converse(client, conversation, block)) for conversation in load]
            for conversation in load:
                await client.end(_session_id(conversation, block))
        return [played for task in tasks for played in task.result()]


def _session_id(conversation: Conversation, block: str) -> str:
    return f"{block}-{conversation.name}"


async def _converse(client: Client, conversation: Conversation, block: str) -> list[Played]:
    """Plays one conversation; ends it with the first turn that fails."""
    await asyncio.sleep(conversation.arrival_s)
    messages: list[Message] = [{"role": "system", "content": conversation.system.text}]
    history: list[Played] = []
    for index, turn in enumerate(conversation.turns):
        await asyncio.sleep(turn.pause_s)
        messages.append({"role": "user", "content": turn.says.text})
        played = await _turn(client, conversation, turn, index, messages, _session_id(conversation, block))
        history.append(played)
        if played.failed:
            break
        messages.append({"role": "assistant", "content": played.answer.text})
    return history


async def _turn(
    client: Client,
    conversation: Conversation,
    turn: Turn,
    index: int,
    messages: Sequence[Message],
    session_id: str,
) -> Played:
    answer = await client.send(messages, session_id=session_id, answer_tokens=turn.answer_tokens)
    return Played(
        conversation=conversation.name,
        kind=conversation.kind,
        index=index,
        messages=tuple(messages),
        answer_tokens=turn.answer_tokens,
        answer=answer,
    )
