"""The tenants file while a router runs: what is new counts, and what cannot be used changes nothing."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from backhaul_router import instruments
from backhaul_router.core.errors import ApiError
from backhaul_router.core.queueing import TenantLimits
from backhaul_router.tenants_file import LOOK_S, TenantsFile
from tests.fakes.clock import FakeClock
from tests.fakes.issuer import AUDIENCE, ISSUER, key_set, public_jwk, token
from tests.fakes.readings import Readings
from tests.unit.router.test_tenants import digest

RED = f'[tenants.red]\nkey_sha256 = ["{digest("red-1")}"]\n'
BLUE = f'[tenants.blue]\nkey_sha256 = ["{digest("blue-1")}"]\n'
JWT = f'[jwt]\nissuer = "{ISSUER}"\naudience = ["{AUDIENCE}"]\nkeys_file = "keys.json"\n'
APP = '[tenants.app]\njwt_names = ["red-app"]\n'


class Files:
    """A tenants file and a keys file."""

    def __init__(self, folder: Path) -> None:
        self.path, self.keys = folder / "tenants.toml", folder / "keys.json"

    def write(self, text: str) -> None:
        self.path.write_bytes(text.encode("utf-8", "surrogateescape"))

    def write_unnoticed(self, text: str) -> None:
        """As far as the file's time and length go."""
        before = self.path.stat()
        self.write(text)
        assert self.path.stat().st_size == before.st_size
        os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def write_keys(self, data: bytes) -> None:
        self.keys.write_bytes(data)

    def remove(self) -> None:
        self.path.unlink()

    def remove_keys(self) -> None:
        self.keys.unlink()

    def followed(self) -> TenantsFile:
        return TenantsFile(str(self.path))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.write(RED + BLUE)
    files.write_keys(key_set())
    return files


def let_in(file: TenantsFile, key: str) -> bool:
    try:
        return bool(file.authenticate(f"Bearer {key}"))
    except ApiError:
        return False


async def test_who_is_new_is_let_in_and_who_is_gone_is_refused(files: Files) -> None:
    files.write(RED)
    file = files.followed()
    assert (let_in(file, "red-1"), let_in(file, "blue-1")) == (True, False)
    files.write(BLUE)
    assert await file.look()
    assert (let_in(file, "red-1"), let_in(file, "blue-1")) == (False, True)
    file.check("blue")
    with pytest.raises(ApiError):
        file.check("red")


async def test_a_file_of_equal_length_and_time_is_a_new_one_nevertheless(files: Files) -> None:
    file = files.followed()
    files.write_unnoticed((RED + BLUE).replace(digest("red-1"), digest("red-2")))
    assert await file.look()
    assert (let_in(file, "red-1"), let_in(file, "red-2")) == (False, True)


async def test_what_has_not_changed_is_not_read_anew(files: Files) -> None:
    files.write(JWT + APP)
    file = files.followed()
    with capture_logs() as logs:
        files.write(JWT + APP)
        assert not await file.look()
    assert logs == []


@pytest.mark.parametrize(
    "text",
    ["", "[tenants.red]\nkeys = ['hunter2']", "\udcff", "a = " + "[" * 100_000, JWT, JWT.replace("keys", "none") + APP],
    ids=["empty", "in clear", "no text", "deep", "no tenants", "no keys file"],
)
async def test_a_file_that_cannot_be_used_changes_nothing_and_is_told_of_once(files: Files, text: str) -> None:
    file = files.followed()
    with capture_logs() as logs:
        files.write(text)
        assert not await file.look()
        assert not await file.look()
    assert (let_in(file, "red-1"), let_in(file, "blue-1")) == (True, True)
    (line,) = logs
    assert (line["log_level"], line["event"]) == ("error", "tenants file cannot be used, tenants stay as they are")
    assert "hunter2" not in str(line)
    files.write(RED)
    assert await file.look()
    assert not let_in(file, "blue-1")


async def test_a_file_that_is_gone_changes_nothing(files: Files) -> None:
    file = files.followed()
    files.remove()
    with capture_logs() as logs:
        assert not await file.look()
        assert not await file.look()
    assert let_in(file, "red-1")
    assert [str(files.path) in line["error"] for line in logs] == [True]


async def test_keys_of_tokens_are_followed_too(files: Files) -> None:
    files.write(JWT + APP)
    file = files.followed()
    new = token(key="two", kid="two")
    assert (let_in(file, token()), let_in(file, new)) == (True, False)
    files.write_keys(key_set(public_jwk("ES256", "one"), public_jwk("ES256", "two")))
    assert await file.look()
    assert (let_in(file, token()), let_in(file, new)) == (True, True)
    files.write_keys(b"{")
    assert not await file.look()
    assert (let_in(file, token()), let_in(file, new)) == (True, True)
    files.write_keys(key_set(public_jwk("ES256", "two")))
    assert await file.look()
    assert (let_in(file, token()), let_in(file, new)) == (False, True)


async def test_a_keys_file_may_come_after_the_file_that_names_it(files: Files) -> None:
    file = files.followed()
    files.remove_keys()
    files.write(JWT + APP)
    assert not await file.look()
    assert let_in(file, "red-1")
    files.write_keys(key_set())
    assert await file.look()
    assert let_in(file, token())
    files.write(RED)
    assert await file.look()
    assert not let_in(file, token())


async def test_it_is_looked_at_again_and_again_and_new_limits_are_told(files: Files) -> None:
    clock, told = FakeClock(), asyncio.Queue[Mapping[str, TenantLimits]]()
    following = asyncio.create_task(files.followed().follow(clock, told.put_nowait))
    for turns in (3, 4):
        files.write(RED + f"max_turns = {turns}")
        await clock.advance(LOOK_S)
        assert await told.get() == {"red": TenantLimits(max_turns=turns)}
    following.cancel()
    await asyncio.wait([following])


async def test_what_became_of_a_new_file_is_counted(read: Readings, files: Files) -> None:
    file = files.followed()
    for text in (RED, "[tenants", RED + BLUE):
        files.write(text)
        await file.look()
        await file.look()
    counted = read.of(instruments.TENANT_READS)
    assert (counted[("taken",)], counted[("refused",)]) == (2, 1)
