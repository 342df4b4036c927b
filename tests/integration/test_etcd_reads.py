"""Impatient callers and a slow etcd: reads that nobody waits for any more do no harm."""

import asyncio
import contextlib

import pytest

from backhaul_common.errors import UnavailableError
from backhaul_common.etcd import EtcdClient, EtcdOptions, Get, Put, gathered
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.recovery import recovered

pytestmark = pytest.mark.etcd

GETS = [Get(b"/k/%d" % number, b"/k/%d0" % number, limit=16, newest_first=True) for number in range(16)]


async def test_readers_that_leave_do_not_end_etcd(own_etcd: EtcdProcess) -> None:
    async def read(client: EtcdClient, patience_s: float) -> None:
        with contextlib.suppress(UnavailableError):
            await client.txn([], GETS, timeout_s=patience_s)

    async with EtcdClient(EtcdOptions(endpoints=(own_etcd.endpoint,))) as client:
        await client.txn([], [Put(b"/k/%d" % number, b"v" * 200) for number in range(100)])
        for turn in range(12):
            readers = [asyncio.ensure_future(read(client, 0.0005 * (number % 20))) for number in range(80)]
            await asyncio.sleep(0.0005 * turn)
            for reader in readers[::2]:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        assert own_etcd.running
        await client.txn([], GETS)


async def test_no_more_reads_wait_for_a_frozen_etcd_than_the_limit(
    own_etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "MAX_WAITING", 4)
    async with EtcdClient(EtcdOptions(endpoints=(own_etcd.endpoint,))) as client:
        await client.txn([], GETS)
        own_etcd.pause()
        try:
            results = await asyncio.gather(
                *(client.txn([], GETS, timeout_s=0.2) for _ in range(8)), return_exceptions=True
            )
        finally:
            own_etcd.resume()
        assert all(isinstance(result, UnavailableError) for result in results)
        assert [result.reason for result in results if isinstance(result, UnavailableError)].count("ETCD_BUSY") == 3
        # Those that were left to themselves end now.
        await recovered("reads of a thawed etcd", lambda: client.txn([], GETS), within_s=10)
