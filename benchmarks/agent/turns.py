"""Turns that leave block sets: sent straight to decode engines, labelled as a router labels them."""

import asyncio
import time
from collections.abc import Iterable
from random import Random

import aiohttp

from backhaul_connector.wire import PARAMS_KEY
from backhaul_local.engines import MODEL_NAME
from backhaul_local.processes import LocalError

TOKENS = 100
"""Of each prompt. One more is generated."""

_AT_ONCE = 16
_TIMEOUT_S = 60.0


class Turns:
    """Turns of one engine, each of a conversation of its own."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http
        self._count = 0

    async def leave(self, count: int) -> None:
        """Plays as many turns, several at once. Raises LocalError when one fails."""
        ours = iter(range(count))
        # Not a TaskGroup: the first failure is the one that is told, as it is.
        await asyncio.gather(*(self._play(ours) for _ in range(_AT_ONCE)))

    async def go_on(self, per_s: float, until: float) -> None:
        """Plays turns at an even pace until an instant of the monotonic clock."""
        begin = time.monotonic()
        for number in range(int((until - begin) * per_s)):
            await asyncio.sleep(max(0.0, begin + number / per_s - time.monotonic()))
            await self._turn()

    async def _play(self, ours: Iterable[int]) -> None:
        for _ in ours:
            await self._turn()

    async def _turn(self) -> None:
        self._count += 1
        name = f"conversation-{self._count}"
        body = {
            "model": MODEL_NAME,
            "prompt": Random(name).choices(range(1, 50_000), k=TOKENS),
            "max_tokens": 1,
            "kv_transfer_params": {PARAMS_KEY: {"scope": "benchmark", "keys": [name]}},
        }
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._http.post(f"{self._url}/v1/completions", json=body, timeout=timeout) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LocalError(f"a turn was not answered: {error!r}") from error
        if answer.status != 200:
            raise LocalError(f"a turn was answered with {answer.status}: {text}")
