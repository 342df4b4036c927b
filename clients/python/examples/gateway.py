"""Sends a turn's decode leg itself, as a gateway does: ``python gateway.py --address HOST:PORT "Why?"``.

ADDRESS is the router's ``--listen-gateway``. The answer's bytes come straight from the decode engine.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from backhaul_client import Cause, Gateway, PlannedTurn


async def serve(gateway: Gateway, http: aiohttp.ClientSession, body: Mapping[str, Any]) -> None:
    """Runs one turn, and writes its answer as the client would get it. Raises BackhaulError."""
    async with await gateway.plan(body) as turn:
        await turn.sending()
        sent = time.monotonic()
        try:
            # A leg is sent once: not again on another connection, nor to where it is redirected.
            async with http.post(
                turn.leg.url, data=turn.leg.body, headers=turn.leg.headers, allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    return await turn.refused(answer.status)
                await pass_on(turn, answer, sent)
        except aiohttp.ClientConnectorError:
            await turn.failed(Cause.NOT_CONNECTED)
        except TimeoutError:
            await turn.failed(Cause.TIMEOUT)
        except aiohttp.ClientError:
            await turn.failed(Cause.DISCONNECTED)


async def pass_on(turn: PlannedTurn, answer: aiohttp.ClientResponse, sent: float) -> None:
    """Writes an answer as it comes, and tells the router when it begins and that it is done."""
    first = True
    async for piece in answer.content.iter_any():
        if first:
            first = False
            await turn.first_byte(time.monotonic() - sent)
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    await turn.done()
    print(f"({turn.started.route}, from {turn.leg.url})")


async def main() -> None:
    """Sends one question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:8083", help="the router's address for gateways")
    parser.add_argument("--model", default="backhaul-demo")
    parser.add_argument("question")
    options = parser.parse_args()
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": options.question}],
        "max_tokens": 60,
        "stream": True,
    }
    async with Gateway(options.address) as gateway, aiohttp.ClientSession() as http:
        await serve(gateway, http, body)


if __name__ == "__main__":
    asyncio.run(main())
