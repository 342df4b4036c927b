"""Which calls have spans."""

from backhaul_common.tracing import LONG_LIVED
from tests.apis import services

ANSWERS = {"ChatCompletions", "Completions", "CreateChatCompletion", "CreateCompletion"}
"""Methods whose streams are the answer to one request, and end with it."""


def test_every_stream_is_either_an_answer_or_known_to_live_long() -> None:
    methods = [method for service in services() for method in service.methods]
    streams = {method.name for method in methods if method.server_streaming or method.client_streaming}
    assert len(methods) > 20
    assert streams - ANSWERS == LONG_LIVED
    assert streams >= ANSWERS
