"""The command line under TLS, and with a tenant's key."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from backhaul_cli.__main__ import cli
from backhaul_cli.exits import Exit
from backhaul_local.certificates import Authority, name_of
from tests.fakes.certificates import identity
from tests.integration.tls.test_grpc import serving


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def shown(authority: Authority, role: str = "operator") -> tuple[str, ...]:
    pair = authority.issue(role)
    return ("--tls-ca", str(authority.path), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


async def test_with_a_certificate_it_is_let_in(authority: Authority) -> None:
    async with serving(identity(authority.issue("registry"), authority)) as address:
        answer = await run("nodes", "--registry", address, *shown(authority), "--json")
    assert (answer.exit_code, answer.stdout.strip()) == (Exit.DONE, "[]")


async def test_a_name_replaces_the_host(authority: Authority) -> None:
    async with serving(identity(authority.issue("registry", hosts=()), authority)) as address:
        named = ("--tls-registry-name", name_of("registry"))
        assert (await run("nodes", "--registry", address, *shown(authority), *named)).exit_code == Exit.DONE
        answer = await run("nodes", "--registry", address, *shown(authority))
    assert answer.exit_code == Exit.UNREACHABLE


async def test_a_caller_whose_name_is_not_accepted_is_told_so_with_an_exit_code_of_its_own(
    authority: Authority,
) -> None:
    async with serving(identity(authority.issue("registry"), authority), callers=["router.backhaul"]) as address:
        answer = await run("nodes", "--registry", address, *shown(authority))
    assert answer.exit_code == Exit.DENIED
    assert "CALLER_REFUSED" in answer.output


class _Asked(BaseHTTPRequestHandler):
    """A router that is never ready, and notes with which keys it is asked."""

    keys: list[str | None]

    def do_GET(self) -> None:
        self.keys.append(self.headers.get("authorization"))
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{"ready": false, "reason": "no usable pair"}')

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def router() -> Iterator[tuple[str, list[str | None]]]:
    """The URL of such a router, and the keys."""
    keys: list[str | None] = []
    server = HTTPServer(("127.0.0.1", 0), type("Asked", (_Asked,), {"keys": keys}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", keys
    server.shutdown()
    thread.join()
    server.server_close()


async def test_something_else_than_a_router_is_told_and_no_traceback() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HELO\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        answer = await run("doctor", "--json", "--registry", "127.0.0.1:1", "--router", f"http://127.0.0.1:{port}")
    assert [one["check"] for one in json.loads(answer.stdout)] == ["registry-unreachable", "router-unreachable"]


@pytest.mark.parametrize("source", ["file", "environment"])
def test_a_tenants_key_goes_to_the_router(router: tuple[str, list[str | None]], source: str, tmp_path: Path) -> None:
    url, keys = router
    (tmp_path / "key").write_text("secret\n")
    env = {"BACKHAUL_CLI_KEY": "secret"} if source == "environment" else {}
    flags = ["--key-file", str(tmp_path / "key")] if source == "file" else []
    arguments = ["doctor", "--registry", "127.0.0.1:1", "--router", url, *flags]
    answer = CliRunner(env=env).invoke(cli, arguments)
    assert "no usable pair" in answer.output
    assert keys == ["Bearer secret"]
