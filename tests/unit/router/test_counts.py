"""What a turn, and an event of its stream, cost the router: by counts, which no busy machine changes."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import pytest

from backhaul_router.answers import Checked, with_error_event
from backhaul_router.core.turn import Route
from backhaul_router.core.usage import PromptUsage
from tests.unit.router.ports import Bench, FakeStream, chat_request, ready

EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
CHAT = "/v1/chat/completions"
USAGE = PromptUsage(100, b'{"cached_tokens":16}')

MOST_CALLS_OF_A_TURN = 1_600
"""Of Python functions, those of the fakes among them. There were 1,100 when this was written."""
MOST_CALLS_OF_AN_EVENT = 12
"""There were 7, with counts of tokens to look for 10."""


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts calls of Python functions (`calls`) and JSON documents that are parsed (`parses`)."""
    counts: Counter[str] = Counter()

    def see(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            counts["calls"] += 1
        elif event == "c_call" and function.__name__ in ("decode", "scan_once"):
            counts["parses"] += isinstance(function.__self__, msgspec.json.Decoder)

    sys.setprofile(see)
    try:
        yield counts
    finally:
        sys.setprofile(None)


async def counted(events: int, prompt: PromptUsage | None) -> tuple[Counter[str], list[bytes], list[bytes]]:
    """Passes a stream on; returns what was counted, what came in and what went out."""
    # Each one an object of its own.
    sent = [*(bytes(bytearray(EVENT)) for _ in range(events)), DONE]
    stream = Checked(FakeStream(*sent), prompt)
    with counting() as counts:
        passed = [piece async for piece in with_error_event(stream, CHAT)]
    return counts, sent, passed


def cold_bench() -> Bench:
    return Bench(nodes=ready("p1", "d1"), prefer=Route.COLD)


@pytest.mark.parametrize("prompt", [None, USAGE], ids=["as_it_is", "with_usage"])
async def test_events_are_passed_on_as_they_are_without_a_copy(prompt: PromptUsage | None) -> None:
    _, sent, passed = await counted(100, prompt)
    assert len(passed) == len(sent)
    assert all(piece is one for piece, one in zip(passed, sent, strict=True))


@pytest.mark.parametrize("prompt", [None, USAGE], ids=["as_it_is", "with_usage"])
async def test_no_event_of_a_stream_is_parsed(prompt: PromptUsage | None) -> None:
    counts, _, _ = await counted(100, prompt)
    assert counts["parses"] == 0


@pytest.mark.parametrize("prompt", [None, USAGE], ids=["as_it_is", "with_usage"])
async def test_an_event_takes_a_handful_of_calls(prompt: PromptUsage | None) -> None:
    few, many = (await counted(10, prompt))[0], (await counted(110, prompt))[0]
    assert (many["calls"] - few["calls"]) / 100 <= MOST_CALLS_OF_AN_EVENT


async def test_a_first_turn_takes_two_requests_to_engines_and_none_to_the_registry() -> None:
    bench = cold_bench()
    for _ in range(3):
        await bench.chat("a")
    assert (len(bench.engines.prefills), len(bench.engines.decodes)) == (3, 3)
    assert (bench.registry.lookups, bench.engines.tokenized) == ([], [])


async def test_a_later_turn_takes_one_more_to_the_registry() -> None:
    bench = cold_bench()
    await bench.chat("a", "b", "c")
    assert (len(bench.engines.prefills), len(bench.engines.decodes)) == (1, 1)
    assert (len(bench.registry.lookups), bench.engines.tokenized) == (1, [])


async def test_a_warm_turn_takes_one_lookup_and_one_claim() -> None:
    bench = Bench()
    bench.publish("a")
    assert (await bench.chat("a", "b", "c")).served == ("warm", "")
    assert (len(bench.registry.lookups), len(bench.owner.claims)) == (1, 1)
    assert (len(bench.engines.prefills), len(bench.engines.decodes)) == (1, 1)


async def test_the_logic_of_a_turn_takes_some_hundred_calls_and_five_parses() -> None:
    bench, request = cold_bench(), chat_request("a")
    await bench.run(request)
    with counting() as counts:
        await bench.run(request)
    # The body twice; the prefill engine's answer, its counts and its verdict. The answer itself is a stream.
    assert counts["parses"] == 5
    assert counts["calls"] <= MOST_CALLS_OF_A_TURN
