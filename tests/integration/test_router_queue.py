"""Turns that wait for others to end: of several tenants, with deadlines, from clients that leave."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from backhaul.router.v1 import router_pb2, router_pb2_grpc
from backhaul_common.errors import BackhaulError
from backhaul_common.grpc_client import open_channel, to_error
from tests.fakes.engine import hang
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import CHAT, Got, RouterStack, chat_body, router_stack

TIMEOUT = "x-envoy-expected-rq-timeout-ms"


class Waiting:
    """A router with one slot, which is taken, and turns that wait for it."""

    def __init__(self, stack: RouterStack) -> None:
        self.stack = stack
        self._first: asyncio.Task[Got] | None = None

    async def begin(self) -> None:
        self.stack.prefill.then(hang())
        self._first = asyncio.create_task(self.stack.chat("first"))
        await self.run(1)

    async def end(self) -> None:
        """The turn that runs leaves."""
        assert self._first is not None
        self._first.cancel()
        await asyncio.wait([self._first])

    async def chat(self, content: str = "hi", **fields: Any) -> "asyncio.Task[Got]":
        """Sends a turn; returns when it waits."""
        before = self.stack.router.admission.queued_count
        task = asyncio.create_task(self.stack.chat(content, **fields))
        await self.wait(before + 1)
        return task

    async def run(self, count: int) -> None:
        await eventually(lambda: self.stack.router.admission.turn_count == count)

    async def wait(self, count: int) -> None:
        await eventually(lambda: self.stack.router.admission.queued_count == count)


@asynccontextmanager
async def waiting(**config: Any) -> AsyncIterator[Waiting]:
    async with router_stack(**{"max_turns": 1, "max_queued": 3, **config}) as stack:
        line = Waiting(stack)
        await line.begin()
        yield line
        await line.end()
        await eventually(lambda: _counts(stack) == (0, 0, 0))


def _counts(stack: RouterStack) -> tuple[int, int, int]:
    admission = stack.router.admission
    return admission.turn_count, admission.queued_count, admission.held_bytes


def error(got: Got) -> tuple[int, str]:
    """Returns status and code of a refusal."""
    return got.status, json.loads(got.body)["error"]["code"]


async def over_grpc(stack: RouterStack, *, timeout_s: float) -> BackhaulError:
    """Returns why a turn over gRPC fails."""
    request = router_pb2.ChatCompletionsRequest(body=json.dumps(chat_body("hi")).encode())
    async with open_channel(f"127.0.0.1:{stack.router.grpc_port}") as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [step async for step in stub.ChatCompletions(request, timeout=timeout_s)]
        return to_error(caught.value)


async def test_turns_that_wait_are_answered_in_their_order_and_one_too_many_is_refused() -> None:
    async with waiting() as line:
        turns = [await line.chat(f"turn {number}") for number in range(3)]
        assert error(await line.stack.chat("hi")) == (429, "too_many_turns")
        await line.end()
        assert [turn.status for turn in await asyncio.gather(*turns)] == [200] * 3
        asked = [leg.body["messages"][0]["content"] for leg in line.stack.decode.legs]
        assert asked == ["turn 0", "turn 1", "turn 2"]


async def test_the_body_is_not_read_before_its_turn_has_come() -> None:
    async with waiting() as line:
        turn = await line.chat("x" * 100_000)
        assert line.stack.router.admission.held_bytes < 100_000
        await line.end()
        assert (await turn).status == 200


async def test_one_that_waits_too_long_gets_a_503() -> None:
    async with waiting(queue_timeout_s=0.3) as line:
        got = await line.stack.chat("hi")
        assert error(got) == (503, "queue_timeout")
        assert int(got.headers["retry-after"]) >= 1
        refused = await over_grpc(line.stack, timeout_s=10)
        assert (type(refused).__name__, refused.reason) == ("UnavailableError", "QUEUE_TIMEOUT")
        assert int(refused.metadata["retry_after_s"]) >= 1


async def test_a_gateways_deadline_that_passes_in_the_queue_is_a_504() -> None:
    async with waiting() as line:
        assert error(await line.stack.chat("hi", headers={TIMEOUT: "300"})) == (504, "deadline_passed")
        turn = await line.chat(headers={TIMEOUT: "60000"})
        await line.end()
        assert (await turn).status == 200


async def test_a_grpc_deadline_that_passes_in_the_queue_is_one() -> None:
    async with waiting() as line:
        assert (await over_grpc(line.stack, timeout_s=0.3)).__class__.__name__ == "DeadlineExceededError"
        await line.wait(0)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    async with router_stack(max_turns=1, max_queued=3) as stack:
        line = Waiting(stack)
        await line.begin()
        await asyncio.sleep(2.1)
        await line.end()
        await line.run(0)
        await line.begin()
        got = await stack.chat("hi", headers={TIMEOUT: "2000"})
        assert error(got) == (503, "deadline_unreachable")
        assert int(got.headers["retry-after"]) >= 3
        refused = await over_grpc(stack, timeout_s=2.0)
        assert (type(refused).__name__, refused.reason) == ("UnavailableError", "DEADLINE_UNREACHABLE")
        await line.end()


async def test_a_deadline_that_is_none_is_refused_with_its_name_and_0_is_without_limit() -> None:
    async with router_stack() as stack:
        for value in ("-1", "1.5", "soon", "", "9" * 16, "\u0663"):
            got = await stack.chat("hi", headers={TIMEOUT: value})
            assert got.status == 400
            assert TIMEOUT in json.loads(got.body)["error"]["message"]
        assert (await stack.chat("hi", headers={TIMEOUT: "0"})).status == 200


# Clients that leave


async def send(stack: RouterStack, size: int) -> asyncio.StreamWriter:
    """Sends a turn of about so many bytes, as far as they are taken."""
    _, writer = await asyncio.open_connection("127.0.0.1", stack.router.http_port)
    body = json.dumps(chat_body("x" * size)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return writer


async def test_a_client_that_leaves_while_it_waits_frees_its_place() -> None:
    async with waiting() as line:
        leaving = [await send(line.stack, size) for size in (10, 50_000)]
        await line.wait(2)
        leaving[0].close()
        await line.wait(1)
        leaving[1].transport.abort()
        await line.wait(0)


async def test_one_that_left_unnoticed_behind_a_large_body_leaves_when_its_turn_comes() -> None:
    async with waiting() as line:
        leaving = await send(line.stack, 5_000_000)
        await line.wait(1)
        leaving.transport.abort()
        turn = await line.chat()
        await line.end()
        assert (await turn).status == 200


async def test_a_grpc_client_that_leaves_while_it_waits_frees_its_place() -> None:
    async with waiting() as line:
        leaving = asyncio.create_task(over_grpc(line.stack, timeout_s=60))
        await line.wait(1)
        leaving.cancel()
        await line.wait(0)


# Tenants


def tenants(folder: Path, **limits: str) -> dict[str, Any]:
    """Writes a tenants file, each tenant's key being its name; returns the router's settings."""
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in limits}
    tables = [f'[tenants.{name}]\nkey_sha256 = ["{keys[name]}"]\n{text}\n' for name, text in limits.items()]
    (folder / "tenants.toml").write_text("".join(tables))
    (folder / "key").write_bytes(b"k" * 32)
    return {"tenants_file": str(folder / "tenants.toml"), "cluster_key_file": str(folder / "key")}


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


async def test_a_tenant_at_its_limit_is_refused_while_others_run(tmp_path: Path) -> None:
    files = tenants(tmp_path, small="max_turns = 1\nmax_queued = 0", large="")
    async with router_stack(max_turns=5, max_queued=5, **files) as stack:
        stack.prefill.then(hang())
        first = asyncio.create_task(stack.chat("hi", headers=key("small")))
        await eventually(lambda: stack.router.admission.turn_count == 1)
        assert error(await stack.chat("hi", headers=key("small"))) == (429, "tenant_limit")
        assert (await stack.chat("hi", headers=key("large"))).status == 200
        first.cancel()
        await asyncio.wait([first])


async def test_higher_priority_runs_first_and_displaces_what_is_less_urgent(tmp_path: Path) -> None:
    files = tenants(tmp_path, urgent="priority = 10", normal="", batch="priority = -10")
    async with router_stack(max_turns=1, max_queued=2, **files) as stack:
        stack.prefill.then(hang())
        first = asyncio.create_task(stack.chat("hi", headers=key("normal")))
        await eventually(lambda: stack.router.admission.turn_count == 1)
        turns: dict[str, asyncio.Task[Got]] = {}
        for name in ("batch", "normal", "urgent"):
            turns[name] = asyncio.create_task(stack.chat(name, headers=key(name)))
            await eventually(lambda: stack.router.admission.queued_count == min(2, len(turns)))
        assert error(await turns["batch"]) == (429, "displaced")
        first.cancel()
        assert [(await turns[name]).status for name in ("urgent", "normal")] == [200, 200]
        assert [leg.body["messages"][0]["content"] for leg in stack.decode.legs] == ["urgent", "normal"]


async def test_a_stranger_is_refused_before_it_waits(tmp_path: Path) -> None:
    async with router_stack(max_turns=1, max_queued=1, **tenants(tmp_path, a="")) as stack:
        stack.prefill.then(hang())
        first = asyncio.create_task(stack.chat("hi", headers=key("a")))
        await eventually(lambda: stack.router.admission.turn_count == 1)
        assert (await stack.chat("hi", headers=key("b"))).status == 401
        assert (await over_grpc(stack, timeout_s=5)).__class__.__name__ == "UnauthenticatedError"
        first.cancel()
        await asyncio.wait([first])
