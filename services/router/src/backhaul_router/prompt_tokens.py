"""The tokens of a turn's prompt."""

from collections.abc import Mapping
from typing import Protocol

from backhaul_common.clock import Clock
from backhaul_router.core.body import Endpoint, TurnBody
from backhaul_router.core.engines import EngineError
from backhaul_router.core.legs import prompt_tokens_in, tokenize_body
from backhaul_router.core.nodes import Node

_TOKENIZED = (Endpoint.CHAT, Endpoint.COMPLETIONS)
"""What `/tokenize` takes (`entrypoints/serve/tokenize/protocol.py`)."""


def can_be_told(body: TurnBody) -> bool:
    """Tells whether there is a way to learn the tokens of such a prompt."""
    return body.endpoint in _TOKENIZED


class Tokenizer(Protocol):
    """Turns prompts into tokens."""

    async def tokenize(self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> list[int]:
        """Raises EngineError; empty when refused."""
        ...


class PromptTokens:
    """Takes them from the body, or has an engine tokenize it."""

    def __init__(self, tokenizer: Tokenizer, clock: Clock) -> None:
        self._tokenizer = tokenizer
        self._clock = clock

    async def of(self, body: TurnBody, node: Node, headers: Mapping[str, str], deadline: float) -> list[int]:
        """Returns the tokens, from ``node`` if need be; empty when they cannot be had until ``deadline``.

        ``headers`` go to the engine.
        """
        given = prompt_tokens_in(body)
        if given is not None:
            return given
        if not can_be_told(body):
            return []
        left = deadline - self._clock.monotonic()
        if left <= 0:
            return []
        try:
            return await self._tokenizer.tokenize(
                f"{node.engine_url}/tokenize", tokenize_body(body), headers, timeout_s=left
            )
        except EngineError:
            return []
