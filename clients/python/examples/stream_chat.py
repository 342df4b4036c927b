"""Asks one question and prints the answer as it comes: ``python stream_chat.py --address HOST:PORT "Why?"``."""

import argparse
import asyncio
import sys

from backhaul_client import BackhaulError, Client


async def main() -> None:
    """Prints the answer, and how it was served."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:8081", help="gRPC address of a router")
    parser.add_argument("--model", default="backhaul-demo")
    parser.add_argument("--key", help="the tenant's key")
    parser.add_argument("question")
    options = parser.parse_args()
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": options.question}],
        "max_tokens": 60,
        "stream": True,
    }
    async with Client(options.address, key=options.key) as client:
        try:
            async with client.chat(body, timeout_s=60) as answer:
                async for text in answer.texts():
                    print(text, end="", flush=True)
                print(f"\n({answer.started.route}, {answer.started.prompt_token_count} prompt tokens)")
        except BackhaulError as error:
            again = "" if error.retry_after_s is None else f"; again in {error.retry_after_s:g} s"
            sys.exit(f"{error}{again}")


if __name__ == "__main__":
    asyncio.run(main())
