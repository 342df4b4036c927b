"""Reads of etcd that come while others are on their way go together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar

import pytest

from backhaul_common.errors import UnavailableError
from backhaul_common.etcd import Get, KeyValue, gathered
from backhaul_common.etcd.gathered import MAX_AT_ONCE, MAX_GETS, GatheredReads, Reads, Result

CALLER: ContextVar[str] = ContextVar("caller", default="")


class Etcd:
    """Answers each transaction when it is told to."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        """Keys of each transaction."""
        self.callers: list[str] = []
        self._answers: list[asyncio.Future[None]] = []

    async def send(self, gets: Sequence[Get], timeout_s: float) -> Result:
        self.sent.append([get.key for get in gets])
        self.callers.append(CALLER.get())
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        await answer
        return Result(len(self.sent), tuple((found(get.key),) for get in gets))

    async def answer(self, number: int = -1, *, error: Exception | None = None) -> None:
        """Ends a transaction, and lets what follows from that happen."""
        if error is None:
            self._answers[number].set_result(None)
        else:
            self._answers[number].set_exception(error)
        await settled()


def found(key: bytes) -> KeyValue:
    return KeyValue(key, b"v", 1, 1, 0)


def keys_in(reads: Reads) -> list[bytes]:
    return [kv.key for items in reads for kv in items]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


@pytest.fixture
async def reads(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatheredReads]:
    # Nobody here is ever out of patience, but where a test says so.
    monkeypatch.setattr(gathered, "PATIENCE_S", 60.0)
    reads = GatheredReads(etcd.send)
    yield reads
    await reads.close()


async def asked(reads: GatheredReads, *keys: bytes, timeout_s: float = 60.0) -> "asyncio.Task[Result]":
    task = asyncio.ensure_future(reads.read([Get(key) for key in keys], timeout_s))
    await settled()
    return task


async def test_a_read_alone_goes_at_once(etcd: Etcd, reads: GatheredReads) -> None:
    read = await asked(reads, b"a", b"b")
    assert etcd.sent == [[b"a", b"b"]]
    await etcd.answer()
    assert keys_in((await read).reads) == [b"a", b"b"]


async def test_what_comes_meanwhile_goes_together_and_each_gets_its_own(etcd: Etcd, reads: GatheredReads) -> None:
    first = await asked(reads, b"a")
    others = [await asked(reads, b"b", b"c"), await asked(reads, b"d"), await asked(reads, b"e", b"f")]
    assert etcd.sent == [[b"a"]]
    await etcd.answer()
    assert etcd.sent == [[b"a"], [b"b", b"c", b"d", b"e", b"f"]]
    await etcd.answer()
    assert [keys_in((await read).reads) for read in others] == [[b"b", b"c"], [b"d"], [b"e", b"f"]]
    assert [(await read).revision for read in (first, *others)] == [1, 2, 2, 2]


async def test_no_transaction_has_more_gets_than_etcd_takes(etcd: Etcd, reads: GatheredReads) -> None:
    await asked(reads, b"a")
    for _ in range(15):
        await asked(reads, *(b"%d" % number for number in range(16)))
    for _ in range(4):
        await etcd.answer()
    assert [len(keys) for keys in etcd.sent] == [1, 96, 96, 48]
    assert max(map(len, etcd.sent)) <= MAX_GETS


async def test_a_failure_is_told_to_all_whom_it_concerns(etcd: Etcd, reads: GatheredReads) -> None:
    first, second, third = [await asked(reads, key) for key in (b"a", b"b", b"c")]
    await etcd.answer()
    await etcd.answer(error=UnavailableError("ETCD_UNAVAILABLE", "gone"))
    assert keys_in((await first).reads) == [b"a"]
    for read in (second, third):
        with pytest.raises(UnavailableError):
            await read
    after = await asked(reads, b"d")
    await etcd.answer()
    assert keys_in((await after).reads) == [b"d"]


async def test_who_leaves_takes_nobody_along(etcd: Etcd, reads: GatheredReads) -> None:
    first, second, third, fourth = [await asked(reads, key) for key in (b"a", b"b", b"c", b"d")]
    second.cancel()
    await settled()
    first.cancel()
    await settled()
    # The transaction of the one who left is not waited for.
    assert etcd.sent == [[b"a"], [b"c", b"d"]]
    third.cancel()
    await settled()
    await etcd.answer()
    assert keys_in((await fourth).reads) == [b"d"]


async def test_nobody_waits_longer_than_he_may(etcd: Etcd, reads: GatheredReads) -> None:
    await asked(reads, b"a")
    with pytest.raises(TimeoutError):
        await reads.read([Get(b"b")], 0.0)
    await etcd.answer()
    assert etcd.sent == [[b"a"]]


async def test_patience_with_a_slow_transaction_ends(
    etcd: Etcd, reads: GatheredReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "PATIENCE_S", 0.0)
    for number in range(MAX_AT_ONCE + 2):
        await asked(reads, b"%d" % number)
    assert etcd.sent == [[b"%d" % number] for number in range(MAX_AT_ONCE)]
    await etcd.answer(0)
    assert etcd.sent[-1] == [b"4", b"5"]


async def test_one_too_many_is_refused(etcd: Etcd, reads: GatheredReads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "MAX_WAITING", 2)
    waiting = [await asked(reads, key) for key in (b"a", b"b", b"c")]
    with pytest.raises(UnavailableError, match="ETCD_BUSY"):
        await reads.read([Get(b"d")], 60.0)
    waiting[1].cancel()
    await settled()
    # Who has left makes room.
    await asked(reads, b"e")
    await etcd.answer()
    assert etcd.sent[-1] == [b"c", b"e"]


async def test_a_transaction_belongs_to_the_trace_of_the_first_read_in_it(etcd: Etcd, reads: GatheredReads) -> None:
    for caller in ("one", "two", "three"):
        CALLER.set(caller)
        await asked(reads, b"a")
    CALLER.set("")
    await etcd.answer()
    assert etcd.callers == ["one", "two"]


async def test_closing_ends_what_waits(etcd: Etcd, reads: GatheredReads) -> None:
    first, second, third = [await asked(reads, key) for key in (b"a", b"b", b"c")]
    await etcd.answer()
    fourth = await asked(reads, b"d")
    await reads.close()
    for read in (second, third, fourth):
        with pytest.raises(asyncio.CancelledError):
            await read
    assert etcd.sent == [[b"a"], [b"b", b"c"]]
    await first
