"""The official Python client of OpenAI, against every endpoint and every kind of error."""

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web

from tests.fakes.engine import FakeEngine, Leg, Step, break_after, chunk_of, event_of, hang, raw_stream, refuse
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import RouterStack, router_stack
from tests.unit.router.test_tenants import FILE

MESSAGES: Any = [{"role": "user", "content": "hi"}]
LIMIT = 100_000


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack(body_limit=LIMIT, idle_timeout_s=0.5) as stack:
        yield stack


def client_of(stack: RouterStack, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", **{"api_key": "k", "max_retries": 0, **options})


@pytest.fixture
async def client(stack: RouterStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(stack) as client:
        yield client


async def text_of(stream: Any) -> str:
    """Returns the text of a streamed chat."""
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


# Endpoints


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert reply.choices[0].message.content == "Hello there"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 200


async def test_a_streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert await text_of(stream) == "Hello there"


async def test_a_completion(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(model="tiny", prompt="once")
    assert reply.choices[0].text == "Hello there"


async def test_a_streamed_completion(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    pieces = [chunk_of(object="text_completion", choices=[{"index": 0, "text": text}]) for text in ("on", "ce")]
    stack.decode.then(raw_stream(stack.decode, pieces))
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "once"


async def test_the_models_with_all_their_fields(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    await stack.add(FakeEngine("decode", models=("tiny", "other")))
    models = (await client.models.list()).data
    assert {model.id for model in models} == {"tiny", "other"}
    assert models[0].model_dump()["max_model_len"] == 4096


def test_the_client_without_asyncio() -> None:
    async def drive() -> None:
        async with router_stack() as stack:

            def blocking() -> tuple[str, str]:
                with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="k", max_retries=0) as client:
                    reply = client.chat.completions.create(model="tiny", messages=MESSAGES)
                    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
                    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                    return str(reply.choices[0].message.content), streamed

            assert await asyncio.to_thread(blocking) == ("Hello there", "Hello there")

    asyncio.run(drive())


async def test_the_answer_says_how_its_turn_went(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-backhaul-route"] == "cold"
    assert raw.request_id == "mine"
    assert raw.parse().choices[0].message.content == "Hello there"


# Parameters

TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"max_completion_tokens": 9}, id="max_completion_tokens"),
        pytest.param({"max_tokens": 9, "extra_body": {"min_tokens": 5}}, id="min_tokens"),
        pytest.param({"stop": ["a", "b"]}, id="stop"),
        pytest.param({"logprobs": True, "top_logprobs": 2}, id="logprobs"),
        pytest.param({"tools": [TOOL], "tool_choice": "required"}, id="tools"),
        pytest.param({"response_format": {"type": "json_object"}}, id="response_format"),
        pytest.param({"seed": 1, "temperature": 0.5, "top_p": 0.5, "presence_penalty": 0.1}, id="sampling"),
        pytest.param({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, id="template"),
    ],
)
async def test_parameters_reach_decode_as_they_are(
    client: openai.AsyncOpenAI, stack: RouterStack, fields: dict[str, Any]
) -> None:
    assert (await client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)).choices
    (leg,) = stack.decode.legs
    sent = {**fields, **fields.get("extra_body", {})}
    sent.pop("extra_body", None)
    assert {name: leg.body[name] for name in sent} == sent


async def test_several_choices(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]


async def test_a_list_of_prompts(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    assert (await client.completions.create(model="tiny", prompt=["a", "b"])).choices
    assert stack.decode.legs[0].body["prompt"] == ["a", "b"]


async def test_a_picture_reaches_both_engines_unchanged(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(range(256))).decode()
    content: Any = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
    for leg in (*stack.prefill.legs, *stack.decode.legs):
        assert leg.body["messages"][0]["content"] == content


async def test_token_counts_at_the_end_of_a_stream(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    usage = {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201}
    stack.decode.then(raw_stream(stack.decode, [event_of("Hi"), chunk_of(choices=[], usage=usage)]))
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 201


async def test_a_tool_call_streamed_in_pieces(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    def piece(**function: str) -> bytes:
        calls = [{"index": 0, "id": "c", "type": "function", "function": function}]
        return chunk_of(choices=[{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": None}])

    pieces = [piece(name="f", arguments='{"città'), piece(arguments='": "東京"}')]
    stack.decode.then(raw_stream(stack.decode, pieces))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, tools=[TOOL])
    arguments = ""
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments += (call.function and call.function.arguments) or ""
    assert json.loads(arguments) == {"città": "東京"}


async def test_logprobs_of_two_megabytes_in_one_event(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    top = [{"token": "x" * 50, "logprob": -1.0, "bytes": list(range(50))}] * 20_000
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}]
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None, "logprobs": {"content": content}}
    event = chunk_of(choices=[choice])
    assert len(event) > 2 * 1024 * 1024
    stack.decode.then(raw_stream(stack.decode, [event]))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, logprobs=True)
    (chunk,) = [chunk async for chunk in stream]
    assert chunk.choices[0].logprobs is not None
    assert chunk.choices[0].logprobs.content is not None
    assert len(chunk.choices[0].logprobs.content[0].top_logprobs) == 20_000


async def test_a_body_of_ten_megabytes() -> None:
    async with router_stack() as stack, client_of(stack) as client:
        text = "x" * 10 * 1024 * 1024
        # The test server of the engine reads up to 64 MiB, the router up to 16.
        reply = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}])
        assert reply.choices[0].message.content == "Hello there"
        assert len(stack.decode.legs[0].body["messages"][0]["content"]) == len(text)


# Streams in every dialect


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("space", [" ", ""], ids=["space", "no space"])
async def test_the_text_is_the_same_in_every_dialect(
    client: openai.AsyncOpenAI, stack: RouterStack, end: str, space: str
) -> None:
    words = ["你好", " 👋🏽", " a", "\n", "z"]
    blocks = [f": ping{end}"]
    for word in words:
        data = event_of(word).decode().strip().removeprefix("data: ")
        # JSON may be cut between two data lines wherever it may hold a line break.
        first, second = data.split(", ", 1)
        blocks += [f"event: message{end}data:{space}{first},{end}data:{space}{second}{end}", f": ping{end}"]
    blocks.append(f"data:{space}[DONE]{end}")
    stack.decode.then(raw_stream(stack.decode, [(block + end).encode() for block in blocks], done=False))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert await text_of(stream) == "".join(words)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
async def test_the_text_is_the_same_wherever_the_network_cuts(
    client: openai.AsyncOpenAI, stack: RouterStack, end: bytes
) -> None:
    event = (event_of("你👋🏽") + b"data: [DONE]\n\n").replace(b"\n", end)
    for cut in range(1, len(event)):
        stack.decode.then(_in_two(event[:cut], event[cut:]))
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert await text_of(stream) == "你👋🏽"


# Errors of engines


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (408, openai.APIStatusError),
        (409, openai.ConflictError),
        (413, openai.APIStatusError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_decodes_errors_are_typed(
    client: openai.AsyncOpenAI, stack: RouterStack, status: int, error: type[openai.APIStatusError], stream: bool
) -> None:
    stack.decode.then(*[refuse(status, "maximum context length is 4000", {"retry-after": "9"}) for _ in range(3)])
    with pytest.raises(error, match="maximum context length is 4000") as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "9"
    assert caught.value.response.headers["content-type"].startswith("application/json")


async def test_prefills_error_is_typed_too(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    stack.prefill.then(refuse(400, "bad grammar"))
    with pytest.raises(openai.BadRequestError, match="bad grammar"):
        await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert stack.decode.legs == []


async def test_an_answer_that_makes_no_sense_is_a_502(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    stack.decode.then(*[_text('["kv_transfer_params"') for _ in range(3)])
    with pytest.raises(openai.InternalServerError, match="the decode engine failed") as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.status_code == 502


async def test_an_engine_without_the_clients_key_refuses_the_model_list_too(stack: RouterStack) -> None:
    async with router_stack(
        prefill=FakeEngine("prefill", api_key="a"), decode=FakeEngine("decode", api_key="a")
    ) as own:
        async with client_of(own, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="Unauthorized"):
                await client.models.list()
            with pytest.raises(openai.AuthenticationError, match="Unauthorized"):
                await client.chat.completions.create(model="tiny", messages=MESSAGES)
        async with client_of(own, api_key="a") as client:
            assert [model.id for model in (await client.models.list()).data] == ["tiny"]


# Errors of the router


@pytest.mark.parametrize("wrong", [{"messages": []}, {"messages": "x"}, {"n": "many"}, {"model": ""}])
async def test_what_is_not_valid_is_a_bad_request(client: openai.AsyncOpenAI, wrong: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **wrong})
    (param,) = wrong
    assert caught.value.param == param
    assert param in caught.value.message


async def test_an_unknown_model(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    for ask in (
        client.chat.completions.create(model="nope", messages=MESSAGES),
        client.completions.create(model="nope", prompt="x"),
    ):
        with pytest.raises(openai.NotFoundError, match="'nope' does not exist") as caught:
            await ask
        assert caught.value.code == "model_not_found"
    assert stack.prefill.legs == []


async def test_endpoints_that_are_not_served(client: openai.AsyncOpenAI) -> None:
    asks: list[Awaitable[Any]] = [
        client.responses.cancel("resp_1"),
        client.batches.list(),
        client.moderations.create(input="x"),
        client.images.generate(prompt="x"),
        client.files.list(),
        client.audio.transcriptions.create(model="tiny", file=("a.wav", io.BytesIO(b"RIFF"))),
        client.models.retrieve("tiny"),
    ]
    for ask in asks:
        with pytest.raises(openai.NotFoundError, match="there is no /v1/"):
            await ask


async def test_a_body_beyond_the_limit(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x" * LIMIT}]
    with pytest.raises(openai.APIStatusError, match=f"larger than {LIMIT} bytes") as caught:
        await client.chat.completions.create(model="tiny", messages=messages)
    assert caught.value.status_code == 413


async def test_a_key_of_nobody(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(FILE)
    (tmp_path / "key").write_bytes(b"k" * 32)
    files: dict[str, Any] = {"tenants_file": str(tmp_path / "tenants.toml"), "cluster_key_file": str(tmp_path / "key")}
    async with router_stack(**files) as stack, client_of(stack, api_key="nobody's") as client:
        asks: list[Awaitable[Any]] = [
            client.chat.completions.create(model="tiny", messages=MESSAGES),
            client.completions.create(model="tiny", prompt="x"),
            client.models.list(),
        ]
        for ask in asks:
            with pytest.raises(openai.AuthenticationError):
                await ask


async def test_no_capacity(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    await stack.lose(stack.decode)
    await stack.add(FakeEngine("decode"), state=1)
    with pytest.raises(openai.InternalServerError, match="node is ready") as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")


async def test_an_engine_that_takes_too_long_is_a_504() -> None:
    async with router_stack(first_byte_timeout_s=0.3) as stack, client_of(stack) as client:
        stack.decode.then(hang(), hang())
        with pytest.raises(openai.InternalServerError, match="timeout") as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert (caught.value.status_code, caught.value.type) == (504, "timeout_error")


async def test_a_full_router_and_a_client_that_tries_again_by_itself() -> None:
    async with router_stack(max_turns=1) as stack, client_of(stack) as client:
        stack.decode.then(_after(0.4))
        first = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=MESSAGES))
        await eventually(lambda: stack.router.admission.turn_count == 1)
        with pytest.raises(openai.RateLimitError, match="which is its limit") as caught:
            await client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert caught.value.code == "too_many_turns"
        async with client_of(stack, max_retries=2) as patient:
            assert (await patient.chat.completions.create(model="tiny", messages=MESSAGES)).choices
        assert (await first).choices


async def test_a_router_that_is_gone(stack: RouterStack) -> None:
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.APIConnectionError):
            await client.chat.completions.create(model="tiny", messages=MESSAGES)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_gives_up_ends_its_turn_within_a_second(stack: RouterStack, stream: bool) -> None:
    stack.decode.then(hang())
    async with client_of(stack, timeout=0.3) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream)
    began = time.monotonic()
    await eventually(lambda: stack.decode.legs[0].closed_early.is_set() and stack.router.routing.live.load.total == 0)
    assert time.monotonic() - began < 1


async def test_a_stream_that_is_closed_ends_its_turn_within_a_second(
    client: openai.AsyncOpenAI, stack: RouterStack
) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    await anext(stream)
    await stream.close()
    began = time.monotonic()
    await eventually(lambda: stack.decode.legs[0].closed_early.is_set() and stack.router.routing.live.load.total == 0)
    assert time.monotonic() - began < 1


# Errors inside a stream


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([event_of("Hel")], id="between two events"),
        pytest.param([event_of("Hel"), b"data: "], id="at the start of an event"),
        pytest.param([event_of("Hel"), event_of("lo")[:40]], id="inside an event"),
        pytest.param([event_of("Hel"), event_of("👋")[:-20]], id="inside a character"),
        pytest.param([event_of("Hel"), event_of("lo")[:-1]], id="before the blank line"),
        pytest.param([event_of("Hel").replace(b"\n", b"\r\n"), b'data: {"x'], id="CRLF"),
    ],
)
async def test_wherever_a_stream_breaks_its_reader_gets_the_error(
    client: openai.AsyncOpenAI, stack: RouterStack, pieces: list[bytes]
) -> None:
    stack.decode.then(break_after(pieces))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert (await anext(stream)).choices[0].delta.content == "Hel"
    with pytest.raises(openai.APIError, match="the decode engine failed") as caught:
        await text_of(stream)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "engine_error"


async def test_a_stream_that_falls_silent_is_an_error(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    stack.decode.chunk_gate = asyncio.Event()
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="timeout"):
        await text_of(stream)


async def test_an_error_that_the_engine_sends_inside_a_stream(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    error = b'data: {"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}\n\n'
    stack.decode.then(raw_stream(stack.decode, [event_of("Hel"), event_of("lo"), error]))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        await text_of(stream)


async def test_a_whole_answer_that_breaks_is_a_502(client: openai.AsyncOpenAI, stack: RouterStack) -> None:
    stack.decode.then(*[_cut_short() for _ in range(3)])
    with pytest.raises(openai.InternalServerError, match="engine failed") as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.status_code == 502


def _in_two(first: bytes, second: bytes) -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first)
        await asyncio.sleep(0)
        await response.write(second)
        await response.write_eof()
        return response

    return step


def _after(seconds: float) -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse | None:
        await asyncio.sleep(seconds)
        return None

    return step


def _text(text: str) -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        return web.Response(text=text, content_type="application/json")

    return step


def _cut_short() -> Step:
    async def step(request: web.Request, leg: Leg) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
        await response.prepare(request)
        await response.write(b'{"id":')
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError

    return step
