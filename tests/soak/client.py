"""Sends one turn as an OpenAI client would, and takes the answer apart."""

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tests.soak.histories import Planned

PATH = "/v1/chat/completions"
REFUSED = "refused"
"""Outcome of a turn that no router took: no connection."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    outcome: str
    """``answered``, ``left`` (by the client), or what went wrong: ``503 no decode node is ready``, ``event: ...``,
    ``connection: ...``, ``refused``, ``hung``, ``cut`` (a stream without an end)."""
    url: str = ""
    """The router."""
    text: str = ""
    """What came of the answer's text, complete or not."""
    route: str = ""
    miss: str = ""
    read_tokens: int = 0


class Client:
    """One connection pool; used inside the loop that it was made in."""

    def __init__(self, session: aiohttp.ClientSession, *, model: str, limit_s: float) -> None:
        """A turn that has not ended after ``limit_s`` seconds counts as hung."""
        self._session = session
        self._model = model
        self._limit_s = limit_s

    async def send(self, url: str, turn: Planned) -> Answer:
        """Sends a turn to the router at ``url``. Never raises for what the server does."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._limit_s):
                return replace(await self._send(url, turn, body), url=url)
        except TimeoutError:
            outcome = "hung"
        except aiohttp.ClientConnectorError:
            return Answer(REFUSED)
        except aiohttp.ClientError as error:
            outcome = f"connection: {type(error).__name__}"
        return Answer(outcome, url, _streamed(body)[1] if turn.stream else "")

    async def _send(self, url: str, turn: Planned, body: bytearray) -> Answer:
        """Sends a turn; ``body`` is what came of a success, however this ends. Raises aiohttp.ClientError."""
        headers = {"x-session-id": turn.session_id} if turn.session_id else {}
        async with self._session.post(url + PATH, json=self._body(turn), headers=headers) as response:
            if response.status != 200:
                return Answer(_refusal(response.status, await response.read()))
            if turn.leave_early and turn.stream:
                body += await response.content.readany()
                response.close()
                return Answer("left", text=_streamed(body)[1])
            async for piece in response.content.iter_any():
                body += piece
            outcome, text = _streamed(body) if turn.stream else _whole(body)
            return Answer(
                outcome,
                text=text,
                route=response.headers.get("x-backhaul-route", ""),
                miss=response.headers.get("x-backhaul-miss", ""),
                read_tokens=int(response.headers.get("x-backhaul-read-tokens", "0")),
            )

    def _body(self, turn: Planned) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": turn.messages,
            "max_tokens": turn.max_tokens,
            "temperature": 0,
        }
        if turn.stream:
            body["stream"] = True
        if turn.choices > 1:
            # vLLM refuses several greedy answers; a simulated engine's are greedy whatever is asked for.
            body |= {"n": turn.choices, "temperature": 1}
        if turn.cache_salt:
            body["cache_salt"] = turn.cache_salt
        return body


def _refusal(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return f"{status} {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status} without OpenAI's form"


def _whole(body: bytearray) -> tuple[str, str]:
    choice = next(filter(_is_first, json.loads(body)["choices"]))
    if choice["finish_reason"] not in ("stop", "length"):
        return f"finish_reason {choice['finish_reason']}", ""
    return "answered", choice["message"]["content"] or ""


def _is_first(choice: dict[str, Any]) -> bool:
    """Tells whether it is of the first answer; all that are asked for are equal."""
    return bool(choice["index"] == 0)


def _streamed(body: bytearray) -> tuple[str, str]:
    """Returns the outcome of a stream that has ended, and the text of its complete lines."""
    text: list[str] = []
    finished = done = False
    for line in body.split(b"\n")[:-1]:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return f"event: {event['error']['message']}", "".join(text)
        for choice in filter(_is_first, event["choices"]):
            text.append(choice["delta"].get("content") or "")
            finished |= choice.get("finish_reason") in ("stop", "length")
    return ("answered" if finished and done else "cut"), "".join(text)
