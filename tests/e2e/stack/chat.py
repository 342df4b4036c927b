"""A chat client of the stack: plain HTTP, so that tests see every byte."""

import json
import ssl
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from backhaul_local.engines import MODEL_NAME

Messages = list[dict[str, Any]]

REPLY_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client saw of a turn."""

    status: int
    raw: str
    text: str
    usage: Mapping[str, Any]
    headers: Mapping[str, str]

    @property
    def route(self) -> str:
        return self.headers["x-backhaul-route"]

    @property
    def miss(self) -> str:
        return self.headers.get("x-backhaul-miss", "")

    @property
    def prompt(self) -> int:
        return int(self.headers["x-backhaul-prompt-tokens"])

    @property
    def local(self) -> int:
        return int(self.headers["x-backhaul-local-tokens"])

    @property
    def read(self) -> int:
        return int(self.headers["x-backhaul-read-tokens"])


class Chat:
    """Talks to one router."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.http = httpx2.Client(
            base_url=url, timeout=60, trust_env=False, headers=dict(headers or {}), verify=tls or True
        )

    def send(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session: str = "",
        reuse: bool = True,
        stream: bool = True,
        tokens: int = REPLY_TOKENS,
        **body: Any,
    ) -> Reply:
        """Runs one turn at temperature 0 with a reply of exactly ``tokens`` tokens."""
        headers = {**({"x-session-id": session} if session else {}), **({} if reuse else {"x-backhaul-reuse": "off"})}
        request = {
            "model": MODEL_NAME,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **body,
        }
        answer = self.http.post("/v1/chat/completions", json=request, headers=headers)
        raw = answer.text
        if answer.status_code != 200:
            return Reply(answer.status_code, raw, "", {}, answer.headers)
        if not stream:
            whole = answer.json()
            text = whole["choices"][0]["message"]["content"]
            return Reply(200, raw, text, whole["usage"], answer.headers)
        lines = raw.split("\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        return Reply(200, raw, text, next((c["usage"] for c in chunks if c.get("usage")), {}), answer.headers)

    def cold(self, messages: Sequence[Mapping[str, Any]], **body: Any) -> str:
        """Returns the right text: computed from nothing, under a salt that nobody else has."""
        reply = self.send(messages, reuse=False, cache_salt=uuid.uuid4().hex, **body)
        assert (reply.status, reply.route, reply.local, reply.read) == (200, "cold", 0, 0), reply.raw
        return reply.text


def opening(words: int = 300) -> Messages:
    """Returns a first message that no other test has, long enough to be worth reading back."""
    story = " ".join(["the driver took the road to the harbour and came back with a load of grain"] * (words // 15))
    return [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"{uuid.uuid4().hex} {story}"},
    ]


def answered(messages: Sequence[Mapping[str, Any]], text: str, question: str = "And what came next?") -> Messages:
    """Returns the messages of the next turn."""
    return [
        *map(dict, messages),
        {"role": "assistant", "content": text},
        {"role": "user", "content": question},
    ]
