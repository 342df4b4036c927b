"""Bodies for router tests."""

from typing import Any

import msgspec

from backhaul_router.core.body import Endpoint, TurnBody, parse_body


def chat(*contents: str, **fields: Any) -> TurnBody:
    """Returns a chat body; contents alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents or ("hi",))]
    return parsed(Endpoint.CHAT, {"model": "tiny", "messages": messages, **fields})


def completion(prompt: Any = "once", **fields: Any) -> TurnBody:
    """Returns a completions body."""
    return parsed(Endpoint.COMPLETIONS, {"model": "tiny", "prompt": prompt, **fields})


def parsed(endpoint: Endpoint, document: dict[str, Any]) -> TurnBody:
    """Returns the body that a document makes."""
    return parse_body(endpoint, msgspec.json.encode(document))


def response(given: Any = "hi", **fields: Any) -> TurnBody:
    """Returns a body of `/v1/responses`."""
    return parsed(Endpoint.RESPONSES, {"model": "tiny", "input": given, **fields})


def message(*contents: Any, **fields: Any) -> TurnBody:
    """Returns a body of `/v1/messages`; contents alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents or ("hi",))]
    return parsed(Endpoint.MESSAGES, {"model": "tiny", "max_tokens": 50, "messages": messages, **fields})
