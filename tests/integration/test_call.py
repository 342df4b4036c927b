"""Calling a service from the command line."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from backhaul_common.call import main
from backhaul_common.errors import UnavailableError
from tests.fakes.owner import FakeOwner

RELEASE = "backhaul.agent.v1.BlockSetService/ReleaseBlockSets"
SERVING = "grpc.health.v1.Health/Check"


@pytest.fixture
async def owner() -> AsyncIterator[FakeOwner]:
    async with FakeOwner() as owner:
        yield owner


async def call(*arguments: str) -> int:
    """Runs the command; returns its exit code, 1 for a message."""
    try:
        await asyncio.to_thread(main, arguments)
    except SystemExit as exited:
        return exited.code if isinstance(exited.code, int) else 1
    return 0


async def test_an_answer_is_printed_as_json(owner: FakeOwner, capsys: pytest.CaptureFixture[str]) -> None:
    owner.hold("set-1", engine_id="e", token_count=5)
    assert await call(owner.address, RELEASE, '{"set_ids": ["set-1", "set-2"]}') == 0
    assert json.loads(capsys.readouterr().out) == {"released": ["set-1"], "deferred": [], "unknown": ["set-2"]}


async def test_without_a_request_an_empty_one_is_sent(owner: FakeOwner, capsys: pytest.CaptureFixture[str]) -> None:
    assert await call(owner.address, SERVING) == 0
    assert "status" in json.loads(capsys.readouterr().out)


async def test_a_stream_is_printed_as_it_comes(owner: FakeOwner, capsys: pytest.CaptureFixture[str]) -> None:
    assert await call(owner.address, "grpc.health.v1.Health/Watch", "--timeout-s", "1") == 1
    assert "status" in json.loads(capsys.readouterr().out)


async def test_a_failure_is_told_with_its_reason(owner: FakeOwner) -> None:
    owner.refusal = UnavailableError("NIXL_STARTING", "not yet")
    with pytest.raises(SystemExit, match=r"^UNAVAILABLE \(NIXL_STARTING\): not yet$"):
        await asyncio.to_thread(main, [owner.address, RELEASE])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere", SERVING], "host:port"),
        (
            ["h:1", "backhaul.Nothing/Do"],
            "no service 'backhaul.Nothing'; there are backhaul.agent.v1.BlockSetService, ",
        ),
        (["h:1", "backhaul.agent.v1.BlockSetService/Do"], "no method 'Do'; it has ClaimBlockSet, "),
        (["h:1", RELEASE, "{"], "JSON"),
        (["h:1", RELEASE, '{"sets": []}'], "sets"),
        (["h:1", "backhaul.registry.v1.NodeService/JoinNode"], "takes a stream"),
        (["h:1", SERVING, "--header", "x"], "NAME:VALUE"),
    ],
    ids=["address", "service", "method", "json", "field", "stream", "header"],
)
async def test_what_cannot_be_called_is_said(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await call(*arguments) == 2
    assert told in capsys.readouterr().err
