"""Clients that leave, in every phase of a turn, over each API: all that runs for them ends within a second."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul.envoy.v3 import ext_proc_pb2_grpc
from backhaul.registry.v1 import registry_pb2
from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.grpc_client import open_channel
from backhaul_router import late_replies
from tests.fakes.engine import FakeEngine, Leg, hang
from tests.fakes.eventually import eventually
from tests.fakes.gateway import FakeGateway
from tests.fakes.router_stack import CHAT, RouterStack, chat_body, router_stack
from tests.integration.test_router_retries import deaf_server
from tests.integration.test_router_turns import label_key

LIMIT_S = 1.0


@dataclass
class Scene:
    """A router with one request in a certain phase."""

    stack: RouterStack
    contents: tuple[str, ...] = ("hi",)
    legs: list[Leg] = field(default_factory=list)
    """Legs that must be closed when the client leaves."""
    exits: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


Enter = Callable[[Scene, Callable[[], None]], Awaitable[None]]
"""Starts a request and returns when it is in the phase."""


async def looking_up(scene: Scene, ask: Callable[[], None]) -> None:
    scene.stack.directory.silent = True
    scene.contents = ("hi", "hello", "more")
    ask()
    await eventually(lambda: bool(scene.stack.directory.lookups))


async def claiming(scene: Scene, ask: Callable[[], None]) -> None:
    scene.stack.hold()
    scene.stack.publish(label_key("hi"))
    scene.stack.owner.silent = True
    scene.contents = ("hi", "hello", "more")
    ask()
    await eventually(lambda: bool(scene.stack.owner.claims))


async def in_prefill(scene: Scene, ask: Callable[[], None]) -> None:
    scene.stack.prefill.then(hang())
    ask()
    await eventually(lambda: bool(scene.stack.prefill.legs))
    scene.legs = scene.stack.prefill.legs


async def between_the_legs(scene: Scene, ask: Callable[[], None]) -> None:
    """The decode engine takes no connection for the moment."""
    node = registry_pb2.Node()
    node.CopyFrom(scene.stack.directory.nodes[f"decode-{scene.stack.decode.port}"])
    node.engine_url = scene.exits.enter_context(deaf_server())
    await scene.stack.directory.put(node)
    await eventually(lambda: any(known.engine_url == node.engine_url for known in scene.stack.router.table))
    ask()
    await eventually(lambda: bool(scene.stack.prefill.legs) and scene.stack.prefill.legs[0].answered)
    await eventually(lambda: scene.stack.router.routing.live.load.total == 1)


async def waiting_for_decode(scene: Scene, ask: Callable[[], None]) -> None:
    scene.stack.decode.then(hang())
    ask()
    await eventually(lambda: bool(scene.stack.decode.legs))
    scene.legs = scene.stack.decode.legs


async def streaming(scene: Scene, ask: Callable[[], None]) -> None:
    scene.stack.decode.chunk_gate = asyncio.Event()
    ask()
    await eventually(lambda: bool(scene.stack.decode.legs))
    await asyncio.sleep(0.05)
    scene.legs = scene.stack.decode.legs


BEFORE = (looking_up, claiming, in_prefill, between_the_legs, waiting_for_decode)
CASES = [(phase, stream) for phase in BEFORE for stream in (True, False)] + [(streaming, True)]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with router_stack(connect_timeout_s=15.0, listen_ext_proc="127.0.0.1:0") as stack:
        scene = Scene(stack)
        with scene.exits:
            yield scene


async def http(scene: Scene, stream: bool) -> None:
    await scene.stack.chat(*scene.contents, stream=stream)


async def grpc(scene: Scene, stream: bool) -> None:
    async with open_channel(f"127.0.0.1:{scene.stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        body = json.dumps(chat_body(*scene.contents, stream=stream)).encode()
        async for _ in stub.ChatCompletions(router_pb2.ChatCompletionsRequest(body=body)):
            pass


async def gateway(scene: Scene, stream: bool) -> None:
    async with FakeGateway(f"127.0.0.1:{scene.stack.router.ext_proc_port}") as gateway:
        await gateway.chat(*scene.contents, stream=stream)


@pytest.mark.parametrize("face", [http, grpc, gateway])
@pytest.mark.parametrize(("phase", "stream"), CASES)
async def test_a_client_that_leaves_ends_all_that_runs_for_it(
    scene: Scene, face: Callable[[Scene, bool], Awaitable[None]], phase: Enter, stream: bool
) -> None:
    asking: list[asyncio.Future[None]] = []
    await phase(scene, lambda: asking.append(asyncio.ensure_future(face(scene, stream))))
    stack = scene.stack
    begun = len(stack.prefill.legs), len(stack.decode.legs)
    asking[0].cancel()
    await asyncio.wait(asking)
    began = time.monotonic()
    await eventually(lambda: stack.router.admission.turn_count == 0, LIMIT_S)
    await eventually(lambda: all(leg.closed_early.is_set() for leg in scene.legs), LIMIT_S)
    assert time.monotonic() - began < LIMIT_S
    assert stack.router.routing.live.load.total == 0
    assert (len(stack.prefill.legs), len(stack.decode.legs)) == begun, "no leg is begun for a client that has gone"
    # Nobody knows what a gateway has sent by then: what nobody reads is freed at its deadline.
    kept = scene.stack.prefill.handed_off if phase is between_the_legs and face is not gateway else []
    await eventually(lambda: stack.owner.released == [(stack.prefill.engine_id, one) for one in kept])
    if phase is claiming:
        await eventually(lambda: stack.owner.returned == [stack.owner.claims[0].request_id])


async def test_a_storm_of_aborts_at_decode_leaves_nothing_running_and_nothing_waiting() -> None:
    """Clients leave 0 to 50 ms after the decode leg began; one decode engine dies of it, the other serves on."""
    async with router_stack(first_byte_timeout_s=10.0) as stack:
        other = await stack.add(FakeEngine("decode"))
        for engine in (stack.decode, other):
            engine.chunk_gate = asyncio.Event()
        chance = random.Random(24)

        async def one() -> None:
            seen = len(stack.decode.legs) + len(other.legs)
            asking = asyncio.ensure_future(stack.client.post(f"{stack.url}{CHAT}", json=chat_body("hi", stream=True)))
            with contextlib.suppress(AssertionError):
                await eventually(lambda: len(stack.decode.legs) + len(other.legs) > seen, 1.0)
            await asyncio.sleep(chance.uniform(0, 0.05))
            if asking.done() and not asking.cancelled() and asking.exception() is None:
                asking.result().close()
            asking.cancel()
            await asyncio.wait([asking])

        for batch in range(5):
            await asyncio.wait_for(asyncio.gather(*[one() for _ in range(40)]), 20)
            if batch == 1:
                await stack.decode.stop()
        await eventually(lambda: stack.router.routing.live.load.total == 0)
        await eventually(lambda: all(leg.closed_early.is_set() for leg in other.legs))
        other.chunk_gate = None
        assert {(await stack.chat("hi", stream=True)).status for _ in range(5)} == {200}
        await stack.decode.start()


@pytest.mark.parametrize("face", [http, grpc, gateway])
async def test_a_hand_off_whose_client_left_just_before_it_was_told_is_freed(
    scene: Scene, face: Callable[[Scene, bool], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill engine has finished: it does not notice that nobody reads its answer."""
    monkeypatch.setattr(late_replies, "READ_ON_S", 3.0)
    stack, noticed = scene.stack, asyncio.Event()

    async def answer_late(request: web.Request, leg: Leg) -> None:
        await noticed.wait()

    stack.prefill.then(answer_late)
    asking = asyncio.ensure_future(face(scene, False))
    await eventually(lambda: bool(stack.prefill.legs))
    asking.cancel()
    await asyncio.wait([asking])
    await eventually(lambda: stack.router.admission.turn_count == 0)
    noticed.set()
    await eventually(lambda: len(stack.owner.released) == 1)
    assert stack.owner.released == [(stack.prefill.engine_id, one) for one in stack.prefill.handed_off]


async def test_a_gateway_that_leaves_in_the_middle_of_a_message_has_gone_and_that_is_all(scene: Scene) -> None:
    """It has no room for the decode leg, so that the picker still sends."""
    head = {":method": "POST", ":path": CHAT, "content-type": "application/json"}
    headers = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in head.items()]
    first = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=headers)),
        protocol_config=pb.ProtocolConfiguration(request_body_mode=pb.BUFFERED),
    )
    body = json.dumps(chat_body("x" * 8 * 1024 * 1024)).encode()
    rest = pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))
    stack = scene.stack
    with capture_logs() as logs:
        async with open_channel(f"127.0.0.1:{stack.router.ext_proc_port}") as channel:
            # Whether gRPC tells of the message or of the call first is chance.
            for _ in range(8):
                stack.prefill.handed_off.clear()
                call = ext_proc_pb2_grpc.ExternalProcessorStub(channel).Process()
                await call.write(first)
                await call.read()
                await call.write(rest)
                await eventually(lambda: bool(stack.prefill.handed_off))
                await asyncio.sleep(0.05)
                call.cancel()
                await eventually(lambda: stack.router.admission.turn_count == 0)
    assert {log["result"] for log in logs if log["event"] == "turn"} <= {"client_gone", "cancelled"}
