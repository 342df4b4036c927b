"""Holds a conversation and shows what each turn could reuse: ``python conversation.py --address HOST:PORT``."""

import argparse
import asyncio

from backhaul_client import Client

QUESTIONS = ("Where does the lorry go?", "And what does it bring back?", "Who waits for it?")


async def main() -> None:
    """Prints each answer with the route of its turn; leaving the conversation has what it retains released."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:8081", help="gRPC address of a router")
    parser.add_argument("--model", default="backhaul-demo")
    options = parser.parse_args()
    system = {"role": "system", "content": "You tell of a lorry and its return trips. " * 20}
    async with (
        Client(options.address) as client,
        client.conversation(options.model, messages=[system], max_tokens=60, min_tokens=60) as conversation,
    ):
        for question in QUESTIONS:
            answer = await conversation.ask(question)
            served = conversation.started
            assert served is not None
            print(f"{question}\n  {answer}\n  ({served.route}, read {served.read_token_count} tokens)")


if __name__ == "__main__":
    asyncio.run(main())
