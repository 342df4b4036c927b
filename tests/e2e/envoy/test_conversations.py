"""Conversations through a real Envoy: routes, texts, and what no router needs to do any more."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from backhaul_local.engines import EngineOptions
from backhaul_local.options import Engine, StackOptions
from backhaul_local.simulated import SimulatedEngine
from backhaul_local.stack import Stack
from benchmarks.routing.machine import process_s
from tests.e2e.stack.chat import Chat, answered, opening
from tests.e2e.stack.conftest import eventually, eventually_warm
from tests.engine_fixtures import REAL

ROUTER = ("--lookup-budget-s", "0.5")
"""Generous: the engines of a test machine take all its cores."""

_SPEEDS = ("--prefill-tokens-per-s", "20000", "--decode-step-s", "0.002", "--max-model-len", "16384")


@pytest.fixture(scope="module", params=["simulated", REAL])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A router behind Envoy; simulated engines, then real ones."""
    real = request.param == "real"
    place = {}
    prefill: Engine = SimulatedEngine(flags=_SPEEDS)
    decode: Engine = SimulatedEngine(flags=_SPEEDS)
    if real:
        names = {"engine_python": "engine_python", "model": "tiny_model"}
        place = {name: request.getfixturevalue(fixture) for name, fixture in names.items()}
        prefill, decode = EngineOptions(), EngineOptions()
    options = StackOptions(
        state=tmp_path_factory.mktemp("envoy"),
        prefill=[prefill],
        decode=[decode] if real else [decode] * 2,
        gateway=True,
        router_flags=["--prefer", "warm", *ROUTER],
        **place,
    )
    with Stack(options) as stack:
        yield stack


@pytest.fixture(scope="module")
def chat(stack: Stack) -> Iterator[Chat]:
    """A client of Envoy, once a conversation was seen to be warm through it."""
    chat = Chat(stack.gateway)
    eventually_warm(chat)
    yield chat
    chat.http.close()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_conversation_is_cold_then_warm_and_says_what_it_would_say_without_reuse(chat: Chat, stream: bool) -> None:
    messages, replies = opening(), []
    for _ in range(3):
        replies.append(chat.send(messages, stream=stream))
        assert replies[-1].text == chat.cold(messages)
        messages = answered(messages, replies[-1].text)

    assert [(reply.status, reply.route) for reply in replies] == [(200, "cold"), (200, "warm"), (200, "warm")]
    assert all(reply.read > 0 for reply in replies[1:])
    assert not any(word in reply.raw for reply in replies for word in ("kv_transfer_params", "remote_host"))


@pytest.mark.parametrize("told", [False, True], ids=["killed", "told to end"])
def test_an_answer_goes_on_when_its_router_is_gone(stack: Stack, chat: Chat, told: bool) -> None:
    messages = opening(60)
    right = chat.cold(messages, tokens=800)
    got: list[str] = []
    with chat.http.stream("POST", "/v1/chat/completions", json=_asked(messages, 800)) as answer:
        lines = answer.iter_lines()
        got.append(next(lines))
        try:
            (stack.stop if told else stack.kill)("router-1")
            # It does not wait for answers that others send.
            assert stack.process("router-1").exit_code == (0 if told else -9)
            got.extend(lines)
            refused = chat.send(opening())
        finally:
            stack.restart("router-1")

    assert "data: [DONE]" in got[-3:]
    assert right.split()[-1] in "".join(got)
    assert (refused.status, "error" in refused.raw) == (503, True)
    eventually(lambda: chat.send(opening()).status == 200, within_s=20)


def test_a_turn_that_has_no_engine_yet_is_refused_when_its_router_is_killed(stack: Stack, chat: Chat) -> None:
    stack.freeze("prefill-1")
    with ThreadPoolExecutor() as pool:
        try:
            asked = pool.submit(chat.send, opening())
            time.sleep(1)
            assert not asked.done()
            stack.kill("router-1")
            got = asked.result(timeout=20)
        finally:
            stack.thaw("prefill-1")
            stack.kill("router-1")
            stack.restart("router-1")

    assert (got.status, "error" in got.raw) == (503, True)
    eventually_warm(chat)


def test_tokens_cost_no_router_any_time(stack: Stack, chat: Chat) -> None:
    def cost_s(tokens: int) -> float:
        before = process_s(stack.process("router-1").pid)
        streams = [threading.Thread(target=_stream, args=(stack.gateway, tokens)) for _ in range(64)]
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()
        return process_s(stack.process("router-1").pid) - before

    cost_s(10)
    short, long = cost_s(10), cost_s(400)

    # Through Python 64 x 390 tokens cost about a second.
    assert long - short < 0.4


def _stream(url: str, tokens: int) -> None:
    chat = Chat(url)
    chat.send([{"role": "user", "content": uuid.uuid4().hex}], tokens=tokens)
    chat.http.close()


def _asked(messages: object, tokens: int) -> dict[str, object]:
    limits = {"max_tokens": tokens, "min_tokens": tokens, "temperature": 0}
    return {"model": "backhaul-demo", "messages": messages, "stream": True, **limits}
