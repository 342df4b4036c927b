"""A chat client that streams, and looks at the clock when the first text comes."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

_PATH = "/v1/chat/completions"

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back of one turn."""

    outcome: str
    """``answered``, or what went wrong."""
    ttft_s: float = 0.0
    """From sending the request to the first text."""
    text: str = ""
    route: str = ""
    miss: str = ""
    prompt_tokens: int = 0
    local_tokens: int = 0
    """Prompt tokens that the prefill engine had in its own cache."""
    read_tokens: int = 0
    """Prompt tokens that it read from the decode engine."""


class Client:
    """Talks to one router; used inside the loop that its session was made in."""

    def __init__(
        self, session: aiohttp.ClientSession, *, url: str, model: str, cache_salt: str, limit_s: float = 60.0
    ) -> None:
        """A turn that has not ended after ``limit_s`` seconds has failed."""
        self._session = session
        self._url = url
        self._model = model
        self._cache_salt = cache_salt
        self._limit_s = limit_s

    async def send(self, messages: Sequence[Message], *, session_id: str, answer_tokens: int) -> Answer:
        """Sends one turn, for an answer of exactly so many tokens. Never raises for what the server does."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": answer_tokens,
            "min_tokens": answer_tokens,
            "temperature": 0,
            "stream": True,
            "cache_salt": self._cache_salt,
        }
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._send(body, session_id)
        except TimeoutError:
            return Answer(outcome="hung")
        except aiohttp.ClientError as error:
            return Answer(outcome=f"connection: {type(error).__name__}")

    async def end(self, session_id: str) -> None:
        """Says that a conversation is over. Raises aiohttp.ClientError."""
        path = f"/v1/conversations/{quote(session_id)}"
        async with self._session.delete(self._url + path, params={"cache_salt": self._cache_salt}) as response:
            await response.read()

    async def _send(self, body: dict[str, Any], session_id: str) -> Answer:
        headers = {"x-session-id": session_id}
        sent = time.perf_counter()
        async with self._session.post(self._url + _PATH, json=body, headers=headers) as response:
            if response.status != 200:
                return Answer(outcome=f"{response.status} {(await response.text())[:200]}")
            stream = _Stream()
            async for line in response.content:
                stream.take(line)
            counts = (response.headers.get(f"x-backhaul-{name}-tokens", "0") for name in ("prompt", "local", "read"))
            prompt, local, read = map(int, counts)
            return Answer(
                outcome=stream.outcome,
                ttft_s=stream.first - sent,
                text="".join(stream.text),
                route=response.headers.get("x-backhaul-route", ""),
                miss=response.headers.get("x-backhaul-miss", ""),
                prompt_tokens=prompt,
                local_tokens=local,
                read_tokens=read,
            )


class _Stream:
    """An answer as its lines come."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.first = 0.0
        """When the first text came, as ``time.perf_counter`` has it."""
        self._error = ""
        self._done = False

    def take(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line.startswith(b"data: [DONE]"):
            self._done = True
            return
        event = json.loads(line[6:])
        self._error = self._error or event.get("error", {}).get("message", "")
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                self.first = self.first or time.perf_counter()
                self.text.append(text)

    @property
    def outcome(self) -> str:
        if self._error:
            return f"event: {self._error}"
        return "answered" if self._done and self.first else "cut"
