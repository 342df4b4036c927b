"""Reads of etcd that nobody waits for any more are limited too."""

import asyncio

import grpc
import pytest

from backhaul_common.errors import UnavailableError
from backhaul_common.etcd import undisturbed
from backhaul_common.etcd.undisturbed import UndisturbedReads


async def test_a_read_beyond_the_limit_is_not_even_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undisturbed, "MAX_READS", 2)
    reads, answered, sent = UndisturbedReads(), asyncio.Event(), 0

    def send() -> "asyncio.Future[bool]":
        nonlocal sent
        sent += 1
        return asyncio.ensure_future(answered.wait())

    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError):
            await reads.wait(send, 0.0)
    with pytest.raises(UnavailableError):
        await reads.wait(send, 0.0)
    assert sent == 2
    answered.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await reads.wait(send, 1.0)
    await reads.close()
