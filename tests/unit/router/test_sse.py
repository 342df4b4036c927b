"""Streams are passed on line by line."""

import pytest

from backhaul_router.core.sse import WholeLines


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
def test_whole_lines_pass_and_an_unfinished_one_waits(end: bytes) -> None:
    lines = WholeLines()
    assert lines.take(b"data: 1" + end + end + b"da") == b"data: 1" + end + end
    assert lines.take(b"ta: 2") == b""
    assert lines.take(end + b"x") == b"data: 2" + end
    assert lines.rest() == b"x"
    assert lines.rest() == b""


def test_nothing_is_lost_wherever_a_stream_is_cut() -> None:
    stream = "data: 你好 👋🏽\r\n\r\n: ping\n\ndata: 1\rdata: 2\r\rtail".encode()
    for cut in range(len(stream) + 1):
        lines = WholeLines()
        assert lines.take(stream[:cut]) + lines.take(stream[cut:]) + lines.rest() == stream


def test_a_very_long_line_is_not_held_back() -> None:
    lines = WholeLines()
    sent = [lines.take(b"x" * 10_000) for _ in range(20)]
    assert sum(map(len, sent)) + len(lines.rest()) == 200_000
    assert max(map(len, sent)) < 80_000
