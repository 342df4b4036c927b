"""The index of block set pointers against a real etcd."""

import asyncio
from typing import Any

import grpc
import pytest

from backhaul.registry.v1 import registry_pb2 as pb
from backhaul_common.grpc_client import to_error
from tests.fakes import samples
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually
from tests.fakes.registry_process import Registry, running_registry
from tests.fakes.streams import Publishing, Watching

pytestmark = pytest.mark.etcd


async def find(registry: Registry, *keys: str, scope: str = "scope") -> list[str]:
    request = pb.FindBlockSetsRequest(scope=scope, keys=keys or ("k1",))
    answer = await registry.index.FindBlockSets(request, timeout=5)
    return [pointer.set_id for pointer in answer.pointers]


async def listed(registry: Registry, **request: Any) -> list[str]:
    answer = await registry.index.ListBlockSets(pb.ListBlockSetsRequest(**request), timeout=5)
    return [pointer.set_id for pointer in answer.pointers]


def lease_of_the_pointer(etcd: EtcdProcess, cluster: str) -> str:
    fields = etcd.etcdctl("get", "--prefix", f"/{cluster}/index/", "-w", "fields").splitlines()
    (lease_id,) = [int(line.split(":")[1]) for line in fields if line.startswith('"Lease"')]
    return f"{lease_id:x}"


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = to_error(caught.value)
    return type(error).__name__, error.reason


async def test_a_published_pointer_is_found_whole(registry: Registry) -> None:
    async with Publishing(registry.index) as stream:
        opened = await stream.open()
        assert opened.opened.ttl.seconds == 30
        acknowledged = await stream.batch([samples.pointer()])
        assert acknowledged.acknowledged.nonce == 1
        answer = await registry.index.FindBlockSets(pb.FindBlockSetsRequest(scope="scope", keys=["k1"]), timeout=5)
        assert list(answer.pointers) == [samples.pointer()]


async def test_pointers_come_by_key_newest_first_and_at_most_16_each(registry: Registry) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        for number in range(20):
            await stream.batch([samples.pointer(f"set-{number:02}")])
        await stream.batch([samples.pointer("other", key="k2")])
        assert await find(registry, "k2", "nothing", "k1") == ["other", *(f"set-{n:02}" for n in range(19, 3, -1))]


async def test_a_key_is_no_prefix_of_another_and_scopes_are_apart(registry: Registry) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer("long", key="k11"), samples.pointer("other", scope="scope2")])
        assert await find(registry, "k1") == []
        assert await find(registry, "k1", scope="scope2") == ["other"]


async def test_a_set_id_may_hold_any_characters(registry: Registry) -> None:
    set_id = "cmpl/../%2F x\n\u00e9"
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer(set_id)])
        assert await find(registry) == [set_id]
        await stream.batch(removals=[samples.pointer(set_id)])
        assert await find(registry) == []


async def test_within_a_batch_the_last_word_on_a_pointer_counts(registry: Registry) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer(), samples.pointer(token_count=1280)], [samples.pointer("unknown")])
        answer = await registry.index.FindBlockSets(pb.FindBlockSetsRequest(scope="scope", keys=["k1"]), timeout=5)
        assert [pointer.token_count for pointer in answer.pointers] == [1280]
        await stream.batch([samples.pointer(token_count=640)], [samples.pointer()])
        assert await find(registry) == []


async def test_a_large_batch_is_durable_when_acknowledged_and_gone_after_a_half_close(registry: Registry) -> None:
    pointers = [samples.pointer(f"set-{number}", key=f"k{number}") for number in range(1000)]
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch(pointers)
        assert await find(registry, "k0", "k999") == ["set-0", "set-999"]
        assert len(await listed(registry, page_size=5000)) == 1000
        await stream.finish()
    assert await listed(registry) == []


async def test_a_broken_stream_leaves_its_pointers_for_the_ttl(shared_etcd: EtcdProcess, cluster: str) -> None:
    async with running_registry(shared_etcd.endpoint, cluster, pointer_ttl_s=2.0) as registry:
        async with Publishing(registry.index) as stream:
            await stream.open()
            await stream.batch([samples.pointer()])
            # The registry keeps the lease alive beyond its TTL.
            await asyncio.sleep(3)
            assert await find(registry) == ["set-1"]
        await asyncio.sleep(0.5)
        assert await find(registry) == ["set-1"]

        async def gone() -> bool:
            return await find(registry) == []

        await eventually(gone, 6)


async def test_a_pointer_published_again_moves_to_the_new_stream(
    registry: Registry, shared_etcd: EtcdProcess, cluster: str
) -> None:
    async with (
        running_registry(shared_etcd.endpoint, cluster) as other,
        Publishing(registry.index) as old,
        Publishing(other.index) as new,
    ):
        await old.open()
        await old.batch([samples.pointer("kept"), samples.pointer("dropped")])
        await new.open()
        await new.batch([samples.pointer("kept")])
        await old.finish()
        assert await find(other) == ["kept"]
        assert await find(registry) == ["kept"]


async def test_a_lost_lease_aborts_the_stream(registry: Registry, shared_etcd: EtcdProcess, cluster: str) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer()])
        shared_etcd.etcdctl("lease", "revoke", lease_of_the_pointer(shared_etcd, cluster))
        error = await stream.fails(upserts=[samples.pointer("set-2")])
        assert (type(error).__name__, error.reason) == ("AbortedError", "LEASE_LOST")


async def test_a_lost_lease_aborts_an_idle_stream_too(shared_etcd: EtcdProcess, cluster: str) -> None:
    async with (
        running_registry(shared_etcd.endpoint, cluster, pointer_ttl_s=2.0) as registry,
        Publishing(registry.index) as stream,
    ):
        await stream.open()
        await stream.batch([samples.pointer()])
        shared_etcd.etcdctl("lease", "revoke", lease_of_the_pointer(shared_etcd, cluster))
        assert (await stream.failure()).reason == "LEASE_LOST"


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        pytest.param({"upserts": [samples.pointer(scope="a/b")]}, "ID_INVALID", id="slash in the scope"),
        pytest.param({"upserts": [samples.pointer("x" * 257)]}, "ID_INVALID", id="long set id"),
        pytest.param({"upserts": [samples.pointer(digest=b"short")]}, "POINTER_INVALID", id="short digest"),
        pytest.param({"upserts": [samples.pointer(engine_id="e2")]}, "POINTER_FOREIGN", id="other engine"),
        pytest.param({"removals": [samples.pointer(key="")]}, "ID_INVALID", id="no key"),
        pytest.param({"upserts": [samples.pointer()] * 1001}, "BATCH_LIMIT", id="too many"),
        pytest.param({"nonce": 1}, "NOT_INCREASING", id="nonce"),
    ],
)
async def test_a_wrong_batch_is_refused_and_writes_nothing(
    registry: Registry, batch: dict[str, Any], reason: str
) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch()
        error = await stream.fails(**batch)
        assert (type(error).__name__, error.reason) == ("InvalidArgumentError", reason)
    assert await listed(registry) == []


async def test_a_stream_that_does_not_open_is_refused(registry: Registry) -> None:
    async with Publishing(registry.index) as stream:
        assert (await stream.fails()).reason == "OPEN_EXPECTED"
    async with Publishing(registry.index) as stream:
        await stream.finish()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        pytest.param(pb.FindBlockSetsRequest(scope="s"), "KEY_LIMIT", id="no keys"),
        pytest.param(pb.FindBlockSetsRequest(scope="s", keys=map(str, range(17))), "KEY_LIMIT", id="17 keys"),
        pytest.param(pb.FindBlockSetsRequest(scope="s", keys=["k", "k"]), "KEY_REPEATED", id="repeated"),
        pytest.param(pb.FindBlockSetsRequest(scope="", keys=["k"]), "ID_INVALID", id="no scope"),
        pytest.param(pb.FindBlockSetsRequest(scope="s", keys=["a/b"]), "ID_INVALID", id="slash"),
    ],
)
async def test_a_wrong_search_is_refused(registry: Registry, request_: pb.FindBlockSetsRequest, reason: str) -> None:
    assert await refusal(registry.index.FindBlockSets(request_, timeout=5)) == ("InvalidArgumentError", reason)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        pytest.param(pb.ListBlockSetsRequest(page_size=5001), "PAGE_SIZE_INVALID", id="large page"),
        pytest.param(pb.ListBlockSetsRequest(page_size=-1), "PAGE_SIZE_INVALID", id="negative page"),
        pytest.param(pb.ListBlockSetsRequest(page_token="***"), "PAGE_TOKEN_INVALID", id="token"),
        pytest.param(pb.ListBlockSetsRequest(scope="a/b"), "ID_INVALID", id="scope"),
    ],
)
async def test_a_wrong_listing_is_refused(registry: Registry, request_: pb.ListBlockSetsRequest, reason: str) -> None:
    assert await refusal(registry.index.ListBlockSets(request_, timeout=5)) == ("InvalidArgumentError", reason)


async def test_a_listing_comes_in_pages(registry: Registry) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer(f"set-{n}", scope=f"s{n % 2}") for n in range(10)])
        token = ""
        pages: list[list[str]] = []
        while not pages or token:
            request = pb.ListBlockSetsRequest(scope="s1", page_size=2, page_token=token)
            answer = await registry.index.ListBlockSets(request, timeout=5)
            pages.append([pointer.set_id for pointer in answer.pointers])
            token = answer.next_page_token
        assert pages == [["set-1", "set-3"], ["set-5", "set-7"], ["set-9"]]
        assert len(await listed(registry)) == 10


async def test_removing_counts_what_was_there_and_is_idempotent(registry: Registry) -> None:
    request = pb.RemoveBlockSetsRequest(pointers=[samples.pointer("a"), samples.pointer("a"), samples.pointer("b")])
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer("a")])
        assert (await registry.index.RemoveBlockSets(request, timeout=5)).removed_count == 1
        assert (await registry.index.RemoveBlockSets(request, timeout=5)).removed_count == 0
        assert await find(registry) == []


async def test_a_watch_of_one_scope_tells_nothing_of_others(registry: Registry) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer("a"), samples.pointer("b", scope="s2")])
        async with Watching(registry.index.WatchBlockSets(pb.WatchBlockSetsRequest(scope="scope"))) as watch:
            assert [pointer.set_id for pointer in (await watch.next()).snapshot.pointers] == ["a"]
            await stream.batch([samples.pointer("c", scope="s2")])
            await stream.batch([samples.pointer("d")])
            assert [pointer.set_id for pointer in (await watch.next()).change.upserts] == ["d"]
            await stream.batch(removals=[samples.pointer("d")])
            (removed,) = (await watch.next()).change.removals
            assert (removed.scope, removed.key, removed.set_id, removed.node_id) == ("scope", "k1", "d", "")


async def test_publishing_through_one_replica_is_found_through_another_and_survives_its_end(
    shared_etcd: EtcdProcess, cluster: str
) -> None:
    async with running_registry(shared_etcd.endpoint, cluster) as other:
        async with running_registry(shared_etcd.endpoint, cluster) as replica, Publishing(replica.index) as stream:
            await stream.open()
            await stream.batch([samples.pointer()])
            assert await find(other) == ["set-1"]
            replica.stopping.set()
            assert (await stream.failure()).reason == "SHUTTING_DOWN"
        assert await find(other) == ["set-1"]
        async with Publishing(other.index) as stream:
            await stream.open()
            await stream.batch([samples.pointer()])
            assert await find(other) == ["set-1"]


async def test_an_unreadable_pointer_is_not_found_and_hides_nothing(
    registry: Registry, shared_etcd: EtcdProcess, cluster: str
) -> None:
    async with Publishing(registry.index) as stream:
        await stream.open()
        await stream.batch([samples.pointer()])
        shared_etcd.etcdctl("put", f"/{cluster}/index/scope/k1/zzz", "garbage")
        assert await find(registry) == ["set-1"]
        assert await listed(registry) == ["set-1"]
