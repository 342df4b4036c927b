"""Events are found in chunks of any size."""

from backhaul_client.answer import EventParser

STREAM = b'data: {"a": 1}\n\n: comment\r\ndata:{"b": "\xc3\xa4"}\r\n\r\ndata: [DONE]\n\n'
EVENTS = ['{"a": 1}', '{"b": "ä"}', "[DONE]"]


def test_events_are_the_same_however_they_are_cut() -> None:
    for size in (1, 2, 7, len(STREAM)):
        parser = EventParser()
        pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
        assert [data for piece in pieces for data in parser.feed(piece)] == EVENTS
