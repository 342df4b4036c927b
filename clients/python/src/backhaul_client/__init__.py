"""Client of Backhaul's router: turns, conversations, and turns of which a gateway moves the bytes itself.

async with Client("10.0.0.1:8081", key="...") as client:
    async with client.chat({"model": "m", "messages": [...], "stream": True}) as answer:
        async for text in answer.texts():
            print(text, end="")
"""

from backhaul_client.answer import Answer, Started
from backhaul_client.client import Client, Ended
from backhaul_client.conversation import Conversation
from backhaul_client.errors import (
    BackhaulError,
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    LimitReachedError,
    NotFoundError,
    RefusedByStateError,
    UnauthenticatedError,
    UnavailableError,
)
from backhaul_client.gateway import Cause, Gateway, PlannedTurn
from backhaul_client.retrying import Retries

__all__ = [
    "Answer",
    "BackhaulError",
    "Cause",
    "Client",
    "Conversation",
    "DeadlineExceededError",
    "Ended",
    "EngineFailedError",
    "Gateway",
    "InvalidRequestError",
    "LimitReachedError",
    "NotFoundError",
    "PlannedTurn",
    "RefusedByStateError",
    "Retries",
    "Started",
    "UnauthenticatedError",
    "UnavailableError",
]
