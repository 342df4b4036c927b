"""The etcd client against real etcds: authentication, TLS, several endpoints, broken watches."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from backhaul_common.clock import SystemClock
from backhaul_common.errors import AbortedError, UnauthenticatedError, UnavailableError
from backhaul_common.etcd import EtcdClient, EtcdOptions, Get, Outage, Put, Update, follow
from backhaul_common.tls import Identity, TlsFiles
from backhaul_local.certificates import Authority, Pair
from tests.fakes.certificates import OVER, both, identity, take
from tests.fakes.etcd_process import EtcdProcess
from tests.fakes.eventually import eventually

pytestmark = pytest.mark.etcd


async def put(client: EtcdClient, key: bytes = b"/k", value: bytes = b"v") -> None:
    await client.txn([], [Put(key, value)], repeatable=True)


async def next_update(items: Any, timeout_s: float = 10.0) -> Update:
    async with asyncio.timeout(timeout_s):
        async for item in items:
            if isinstance(item, Update) and (item.listed or item.upserts or item.removals):
                return item
    raise AssertionError("ended")


async def drain(batches: Any) -> None:
    """Reads until the watch fails."""
    async with asyncio.timeout(5):
        async for _ in batches:
            pass


def switch_authentication_on(etcd: EtcdProcess, *flags: str) -> None:
    etcd.etcdctl(*flags, "user", "add", "root:rootpw")
    etcd.etcdctl(*flags, "user", "grant-role", "root", "root")
    etcd.etcdctl(*flags, "user", "add", "backhaul:secret")
    etcd.etcdctl(*flags, "role", "add", "backhaul")
    etcd.etcdctl(*flags, "role", "grant-permission", "backhaul", "--prefix=true", "readwrite", "/k")
    etcd.etcdctl(*flags, "user", "grant-role", "backhaul", "backhaul")
    etcd.etcdctl(*flags, "auth", "enable")


@pytest.fixture(scope="module")
def guarded_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """An etcd that knows users and forgets tokens after a second."""
    with EtcdProcess(tmp_path_factory.mktemp("guarded"), "--auth-token-ttl", "1") as etcd:
        switch_authentication_on(etcd)
        yield etcd


def as_user(etcd: EtcdProcess, **options: Any) -> EtcdClient:
    values = {"endpoints": (etcd.endpoint,), "user": "backhaul", "password": "secret", **options}
    return EtcdClient(EtcdOptions(**values))


async def test_an_expired_token_is_renewed_and_the_call_repeated(guarded_etcd: EtcdProcess) -> None:
    async with as_user(guarded_etcd) as client:
        await put(client)
        # etcd deletes simple tokens in ticks of a second (server/auth/simple_token.go, simpleTokenTTLResolution).
        await asyncio.sleep(2.5)
        await asyncio.gather(*(put(client) for _ in range(20)))
        lease = await client.grant(10)
        await client.keep_alive_once(lease.lease_id)


async def test_following_goes_on_when_etcd_restarts_and_the_token_has_expired(guarded_etcd: EtcdProcess) -> None:
    async with as_user(guarded_etcd) as client, aclosing(follow(client, b"/k", SystemClock())) as items:
        await put(client)
        await next_update(items)
        guarded_etcd.kill()
        guarded_etcd.start()
        await asyncio.sleep(2.5)
        await put(client, b"/k2", str(time.time()).encode())
        while b"/k2" not in [kv.key for kv in (await next_update(items)).upserts]:
            pass


async def test_a_watch_begun_with_an_expired_token_comes_up_with_a_fresh_one(guarded_etcd: EtcdProcess) -> None:
    async with as_user(guarded_etcd) as client:
        revision = (await client.range(Get(b"/k"))).revision
        await asyncio.sleep(2.5)
        async with aclosing(client.watch(b"/k", revision + 1)) as batches:
            with pytest.raises(UnauthenticatedError):
                await drain(batches)
        async with aclosing(client.watch(b"/k", revision + 1)) as batches:
            await anext(batches)
            await put(client)
            assert [kv.key for kv in (await anext(batches)).upserts] == [b"/k"]


async def test_a_token_from_after_the_snapshot_that_etcd_was_restored_from_is_renewed(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path) as etcd:
        switch_authentication_on(etcd)
        etcd.etcdctl("--user", "root:rootpw", "snapshot", "save", str(tmp_path / "snapshot"))
        async with as_user(etcd) as writer:
            for _ in range(100):
                await put(writer)
        async with as_user(etcd, attempt_s=0.5, total_s=1.0) as client:
            await put(client)
            etcd.kill()
            etcd.restore(tmp_path / "snapshot")
            etcd.start()

            async def answered() -> bool:
                try:
                    await client.txn([], [Get(b"/k")])
                except UnavailableError:
                    return False
                return True

            await eventually(answered, 20)


async def test_a_wrong_password_fails_fast_and_is_named(guarded_etcd: EtcdProcess) -> None:
    async with as_user(guarded_etcd, password="wrong") as client:
        started = time.monotonic()
        with pytest.raises(UnauthenticatedError, match="user or the password"):
            await put(client)
        assert time.monotonic() - started < 1


async def test_a_wrong_password_is_not_tried_again_and_again(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path, "--metrics", "extensive") as etcd:
        switch_authentication_on(etcd)
        async with as_user(etcd, password="wrong") as client, aclosing(follow(client, b"/k", SystemClock())) as items:
            before = authentications(etcd)
            for _ in range(5):
                with pytest.raises(UnauthenticatedError, match="user or the password"):
                    await put(client)
                assert isinstance(await anext(items), Outage)
            assert authentications(etcd) - before == 1
            etcd.etcdctl("--user", "root:rootpw", "user", "passwd", "backhaul", "--interactive=false", stdin="wrong")

            async def accepted() -> bool:
                try:
                    await put(client)
                except UnauthenticatedError:
                    return False
                return True

            await eventually(accepted, 10)


def authentications(etcd: EtcdProcess) -> int:
    """Returns how often somebody asked etcd for a token."""
    name = 'grpc_server_handled_total{grpc_code="InvalidArgument",grpc_method="Authenticate"'
    return sum(int(float(line.split()[-1])) for line in etcd.metrics() if line.startswith(name))


async def test_a_missing_permission_is_named_and_no_user_is_refused(guarded_etcd: EtcdProcess) -> None:
    async with as_user(guarded_etcd) as client:
        with pytest.raises(UnauthenticatedError, match="permission"):
            await put(client, b"/elsewhere")
    async with as_user(guarded_etcd, user="", password="") as client:
        with pytest.raises(UnauthenticatedError):
            await put(client)


async def test_a_user_without_authentication_in_etcd_is_no_obstacle(shared_etcd: EtcdProcess) -> None:
    async with as_user(shared_etcd) as client:
        await put(client, b"/noauth")
        await put(client, b"/noauth")


async def test_a_frozen_endpoint_is_left_for_one_that_answers(own_etcd: EtcdProcess, shared_etcd: EtcdProcess) -> None:
    own_etcd.etcdctl("get", "ready")
    options = EtcdOptions(
        endpoints=(own_etcd.endpoint, shared_etcd.endpoint), attempt_s=1.0, progress_s=0.2, silence_s=1.0
    )
    async with EtcdClient(options) as client, aclosing(follow(client, b"/frozen", SystemClock())) as items:
        await next_update(items)
        assert client.endpoint == own_etcd.endpoint
        own_etcd.pause()
        try:
            started = time.monotonic()
            await put(client, b"/frozen/1")
            assert 0.9 < time.monotonic() - started < 2.5
            assert client.endpoint == shared_etcd.endpoint
            # Another cluster answers here; its content is told as another history.
            update = await next_update(items)
            assert (update.reset, [kv.key for kv in update.upserts]) == (True, [b"/frozen/1"])
            assert time.monotonic() - started < 6
        finally:
            own_etcd.resume()


async def test_a_quiet_watch_is_kept_and_a_silent_one_is_not(own_etcd: EtcdProcess) -> None:
    options = EtcdOptions(endpoints=(own_etcd.endpoint,), progress_s=0.2, silence_s=0.8)
    async with EtcdClient(options) as client, aclosing(client.watch(b"/quiet", 1)) as batches:
        quiet_until = time.monotonic() + 1.5
        while time.monotonic() < quiet_until:
            await anext(batches)
        own_etcd.pause()
        try:
            with pytest.raises(UnavailableError, match="silent"):
                await drain(batches)
        finally:
            own_etcd.resume()


async def test_a_compacted_revision_is_named(own_etcd: EtcdProcess) -> None:
    async with EtcdClient(EtcdOptions(endpoints=(own_etcd.endpoint,))) as client:
        for _ in range(3):
            await put(client)
        own_etcd.etcdctl("compact", "3")
        async with aclosing(client.watch(b"/k", 1)) as batches:
            with pytest.raises(AbortedError, match="ETCD_COMPACTED"):
                await drain(batches)
        with pytest.raises(AbortedError, match="ETCD_COMPACTED"):
            await client.range(Get(b"/k"), revision=1)


async def test_following_survives_a_restart_with_a_compaction(own_etcd: EtcdProcess) -> None:
    async with (
        EtcdClient(EtcdOptions(endpoints=(own_etcd.endpoint,))) as client,
        EtcdClient(EtcdOptions(endpoints=(own_etcd.endpoint,), total_s=10)) as writer,
        aclosing(follow(client, b"/k", SystemClock())) as items,
    ):
        await put(client, b"/k1")
        await next_update(items)
        own_etcd.kill()
        assert isinstance(await anext(items), Outage)
        own_etcd.start()
        for name in (b"/k2", b"/k3", b"/k4"):
            await put(writer, name)
        own_etcd.etcdctl("compact", str((await writer.range(Get(b"/k"))).revision))
        update = await next_update(items)
        assert {kv.key for kv in update.upserts} == {b"/k2", b"/k3", b"/k4"}
        assert (update.listed, update.reset) == (True, False)


async def test_a_large_backlog_arrives_whole_and_in_order(shared_etcd: EtcdProcess) -> None:
    async with EtcdClient(EtcdOptions(endpoints=(shared_etcd.endpoint,))) as client:
        start = (await client.range(Get(b"/backlog"))).revision + 1
        for number in range(200):
            await client.txn([], [Put(f"/backlog/{number:03}/{part}".encode(), bytes(20_000)) for part in range(10)])
        seen: list[bytes] = []
        revisions: list[int] = []
        async with aclosing(client.watch(b"/backlog", start)) as batches, asyncio.timeout(20):
            while len(seen) < 2000:
                batch = await anext(batches)
                seen += [kv.key for kv in batch.upserts]
                # A revision of ten keys never comes in two parts, however etcd cuts its messages.
                assert len(batch.upserts) % 10 == 0
                if batch.upserts:
                    revisions.append(batch.revision)
        assert len(set(seen)) == 2000
        assert revisions == sorted(set(revisions))


async def test_a_long_listing_is_read_in_pages_as_of_one_revision(shared_etcd: EtcdProcess) -> None:
    async with EtcdClient(EtcdOptions(endpoints=(shared_etcd.endpoint,))) as client:
        await client.txn([], [Put(f"/pages/{number:03}".encode(), b"v") for number in range(100)])
        listing = await client.list_prefix(b"/pages/", page_size=7)
        assert [kv.key for kv in listing.items] == [f"/pages/{number:03}".encode() for number in range(100)]


async def test_no_call_waits_long_for_nobody() -> None:
    async with EtcdClient(EtcdOptions(endpoints=("127.0.0.1:9",), total_s=0.5)) as client:
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="ETCD_UNAVAILABLE"):
            await client.grant(5)
        assert time.monotonic() - started < 1.5


async def test_proxy_variables_are_ignored(shared_etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with EtcdClient(EtcdOptions(endpoints=(shared_etcd.endpoint,))) as client:
        await put(client, b"/proxy")


def tls_flags(pair: Pair, ca: Path) -> tuple[str, ...]:
    files = ("--cert-file", str(pair.cert), "--key-file", str(pair.key), "--trusted-ca-file", str(ca))
    return (*files, "--client-cert-auth")


async def test_tls_with_client_certificates(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ca"), Authority(tmp_path / "stranger")
    shown = authority.issue("registry")
    with EtcdProcess(tmp_path, *tls_flags(authority.issue("etcd"), authority.path), scheme="https") as etcd:
        options = EtcdOptions(endpoints=(etcd.endpoint,), total_s=0.5)
        async with EtcdClient(options, tls=identity(shown, authority)) as client:
            await put(client)
        async with EtcdClient(options, tls=identity(shown, stranger)) as client:
            with pytest.raises(UnavailableError, match="ETCD_TLS"):
                await put(client)
        strange, old = stranger.issue("registry"), authority.issue("old", life=OVER)
        for tls in (identity(strange, authority), identity(old, authority), identity(None, authority), None):
            async with EtcdClient(options, tls=tls) as client:
                with pytest.raises(UnavailableError):
                    await put(client)


async def test_an_etcd_whose_certificate_has_expired_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    flags = tls_flags(authority.issue("etcd", life=OVER), authority.path)
    with EtcdProcess(tmp_path, *flags, scheme="https") as etcd:
        options = EtcdOptions(endpoints=(etcd.endpoint,), total_s=0.5)
        async with EtcdClient(options, tls=identity(authority.issue("registry"), authority)) as client:
            with pytest.raises(UnavailableError, match="ETCD_TLS"):
                await put(client)


async def test_a_watch_goes_on_and_calls_go_out_under_new_certificates(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    shown, etcds = old.issue("registry"), old.issue("etcd")
    ca = both(tmp_path / "both.pem", old, new)
    tls = Identity("etcd", TlsFiles(cert=str(shown.cert), key=str(shown.key), ca=str(ca)))
    with EtcdProcess(tmp_path, *tls_flags(etcds, ca), scheme="https") as etcd:
        options = EtcdOptions(endpoints=(etcd.endpoint,))
        async with EtcdClient(options, tls=tls) as client, aclosing(client.watch(b"/k", 1)) as batches:
            await put(client, b"/k1")
            assert await next_keys(batches) == [b"/k1"]
            # etcd reads its own at each handshake (client/pkg/transport/listener.go, ``GetCertificate``).
            take(new.issue("etcd"), etcds)
            take(new.issue("registry"), shown)
            tls.look()
            await put(client, b"/k2")
            assert await next_keys(batches) == [b"/k2"]


async def next_keys(batches: Any) -> list[bytes]:
    async with asyncio.timeout(10):
        while not (batch := await anext(batches)).upserts:
            pass
    return [kv.key for kv in batch.upserts]


async def test_a_user_with_a_password_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    shown = authority.issue("operator")
    as_operator = ("--cacert", str(authority.path), "--cert", str(shown.cert), "--key", str(shown.key))
    flags = tls_flags(authority.issue("etcd"), authority.path)
    with EtcdProcess(tmp_path, *flags, scheme="https") as etcd:
        switch_authentication_on(etcd, *as_operator)
        options = EtcdOptions(endpoints=(etcd.endpoint,), user="backhaul", password="secret")
        async with EtcdClient(options, tls=identity(authority.issue("registry"), authority)) as client:
            await put(client)
