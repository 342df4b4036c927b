"""Where one request ends and the next begins: whoever is in front of the router must see it in the same place."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.fakes.eventually import eventually
from tests.fakes.router_stack import RouterStack, router_stack

_BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
_LENGTH = b"content-length: %d\r\n" % len(_BODY)
_CHUNKED = b"transfer-encoding: chunked\r\n"
_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_BODY), _BODY)
_HIDDEN = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
"""What an attacker would have the router take for a request of its own."""


def _request(fields: bytes, body: bytes, *, version: bytes = b"1.1", host: bytes = b"host: x\r\n") -> bytes:
    head = b"POST /v1/chat/completions HTTP/%s\r\n%scontent-type: application/json\r\n" % (version, host)
    return head + fields + b"\r\n" + body


@pytest.fixture
async def stack() -> AsyncIterator[RouterStack]:
    async with router_stack() as stack:
        yield stack


async def _answered(stack: RouterStack, sent: bytes) -> tuple[bytes, bytes]:
    """Returns the head of the first answer, and all that comes after that answer's body until the connection ends."""
    reader, writer = await asyncio.open_connection(stack.host, stack.router.http_port)
    writer.write(sent)
    try:
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            await reader.readexactly(int(lines[b"content-length"]))
            writer.write_eof()
            return head, await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(_request(b"content-length: 5\r\n" + _CHUNKED, _CHUNKS), id="a length, and chunks"),
        pytest.param(_request(b"content-length: 5\r\n" + _LENGTH, _BODY), id="two lengths"),
        pytest.param(_request(b"content-length: +%d\r\n" % len(_BODY), _BODY), id="a length with a sign"),
        pytest.param(_request(b"transfer-encoding: xchunked\r\n", _CHUNKS), id="an unknown encoding"),
        pytest.param(_request(b"transfer-encoding: chunked, identity\r\n", _CHUNKS), id="chunks not last"),
        pytest.param(_request(b"transfer-encoding: identity\r\n" + _CHUNKED, _CHUNKS), id="two encodings"),
        pytest.param(_request(b"transfer-encoding:\x0bchunked\r\n", _CHUNKS), id="an odd space"),
        pytest.param(_request(b"transfer-encoding : chunked\r\n", _CHUNKS), id="a space before the colon"),
        pytest.param(_request(b"x: a\r\n b\r\n" + _LENGTH, _BODY), id="a folded header"),
        pytest.param(_request(b"x: a\x00b\r\n" + _LENGTH, _BODY), id="a NUL in a header"),
        pytest.param(_request(_LENGTH, _BODY, host=b""), id="no host"),
        pytest.param(_request(_LENGTH, _BODY).replace(b"\r\n", b"\n"), id="lines without CR"),
        pytest.param(_request(_CHUNKED, _CHUNKS, version=b"1.0"), id="chunks in HTTP/1.0"),
        pytest.param(_request(b"".join(b"a%d: b\r\n" % n for n in range(200)) + _LENGTH, _BODY), id="200 headers"),
    ],
)
async def test_a_request_that_could_end_in_two_places_is_refused_and_nothing_after_it_is_read(
    stack: RouterStack, request_bytes: bytes
) -> None:
    head, rest = await _answered(stack, request_bytes + _HIDDEN)
    assert (head.split(b" ")[1], rest) == (b"400", b"")
    assert stack.prefill.legs == stack.decode.legs == []


async def test_chunks_that_cannot_be_read_end_a_body_that_has_begun(stack: RouterStack) -> None:
    """The turn would hold its place until the time for the body is over."""
    reader, writer = await asyncio.open_connection(stack.host, stack.router.http_port)
    async with asyncio.timeout(20):
        writer.write(_request(_CHUNKED, b"5\r\n" + _BODY[:5] + b"\r\n"))
        await eventually(lambda: stack.router.admission.held_bytes == 5)
        writer.write(b"no size\r\n" + _HIDDEN)
        told = await reader.read()
    writer.close()
    assert told.split(b" ")[1] == b"400"
    assert told.count(b"HTTP/1.") == 1
    assert stack.router.admission.turn_count == 0


@pytest.mark.parametrize("chunk", [b"-1\r\n", b"%x\n" % len(_BODY), b"0x5\r\n", b" 5\r\n", b"f" * 40 + b"\r\n"])
async def test_a_chunk_whose_size_can_be_read_in_two_ways_ends_the_request(stack: RouterStack, chunk: bytes) -> None:
    head, rest = await _answered(stack, _request(_CHUNKED, chunk + _BODY + b"\r\n0\r\n\r\n") + _HIDDEN)
    assert (head.split(b" ")[1], rest) == (b"400", b"")
    assert stack.decode.legs == []
