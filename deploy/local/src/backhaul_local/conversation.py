"""A streamed conversation through the router, as a chat client would have it."""

import random
import ssl
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
from openai.types.chat import ChatCompletionMessageParam

from backhaul_local.engines import MODEL_NAME

_SEED = 7
_TIMEOUT_S = 120

QUESTIONS = (
    "Please write a short story about it.",
    "Can you say more about the second point?",
    "What happens if the driver falls ill?",
    "Explain it in simple words.",
    "Compare the two answers, and tell me why the last one is better.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is said."""

    turns: int = 5
    document_words: int = 2000
    """Length of the document in the first message."""
    reply_tokens: int = 160
    """Length of every reply."""
    last_reply_tokens: int = 0
    """Length of the last one, which no turn follows; 0: that of every other."""

    def reply_length(self, index: int) -> int:
        """Returns how many tokens the reply of a turn has, from 0 on."""
        last = index == self.turns - 1
        return self.last_reply_tokens if last and self.last_reply_tokens else self.reply_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn was like."""

    route: str
    miss_reason: str
    prompt_tokens: int
    local_tokens: int
    """Prompt tokens that the prefill engine had in its own cache."""
    read_tokens: int
    """Prompt tokens that it read from the decode engine."""
    ttft_s: float
    """From sending the request to the first text."""
    text: str

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the prefill engine computed."""
        return self.prompt_tokens - self.local_tokens - self.read_tokens


def document(words: int) -> str:
    """Returns a text of about so many words; the same one every time."""
    paragraphs = Path(__file__).with_name("corpus.txt").read_text().split("\n\n")
    draw = random.Random(_SEED)
    text: list[str] = []
    while len(text) < words:
        text += draw.choice(paragraphs).split()
    return " ".join(text[:words])


def play(
    url: str,
    plan: Plan,
    *,
    reuse: bool,
    tls: ssl.SSLContext | None = None,
    on_begin: Callable[[int], None] = lambda _: None,
    on_end: Callable[[int, Turn], None] = lambda _number, _turn: None,
) -> Sequence[Turn]:
    """Has a conversation with the router at ``url``, under a cache salt of its own.

    Tells ``on_begin`` and ``on_end`` the number of each turn, from 1 on.

    Raises openai.OpenAIError when a turn fails.
    """
    salt = uuid.uuid4().hex
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "You are a helpful assistant."}]
    turns: list[Turn] = []
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S, http_client=_http_client(tls)
    ) as client:
        for index in range(plan.turns):
            question = QUESTIONS[index % len(QUESTIONS)]
            on_begin(index + 1)
            text = question if index else f"{document(plan.document_words)}\n\n{question}"
            messages.append({"role": "user", "content": text})
            turn = _turn(client, messages, plan.reply_length(index), reuse=reuse, salt=salt)
            messages.append({"role": "assistant", "content": turn.text})
            turns.append(turn)
            on_end(index + 1, turn)
    return turns


def _http_client(tls: ssl.SSLContext | None) -> openai.DefaultHttpxClient:
    """Returns a client that leaves proxy settings alone: the router is on this machine."""
    return openai.DefaultHttpxClient(trust_env=False, verify=tls or True)


def _turn(
    client: openai.OpenAI,
    messages: Sequence[ChatCompletionMessageParam],
    reply_tokens: int,
    *,
    reuse: bool,
    salt: str,
) -> Turn:
    sent = time.perf_counter()
    first = 0.0
    parts: list[str] = []
    with client.chat.completions.with_streaming_response.create(
        model=MODEL_NAME,
        messages=messages,
        temperature=0,
        max_tokens=reply_tokens,
        stream=True,
        extra_body={"cache_salt": salt, "min_tokens": reply_tokens},
        extra_headers={} if reuse else {"x-backhaul-reuse": "off"},
    ) as response:
        headers = response.headers
        for chunk in response.parse():
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter()
                parts.append(chunk.choices[0].delta.content)
    return Turn(
        route=headers.get("x-backhaul-route", "unknown"),
        miss_reason=headers.get("x-backhaul-miss", ""),
        prompt_tokens=int(headers.get("x-backhaul-prompt-tokens", 0)),
        local_tokens=int(headers.get("x-backhaul-local-tokens", 0)),
        read_tokens=int(headers.get("x-backhaul-read-tokens", 0)),
        ttft_s=first - sent,
        text="".join(parts),
    )
