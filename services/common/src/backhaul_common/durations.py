"""Between seconds and protobuf's Duration."""

from google.protobuf.duration_pb2 import Duration

MAX_S = 315_576_000_000.0
"""Longest time that a Duration says: 10,000 years (google/protobuf/duration.proto)."""


def duration(seconds: float) -> Duration:
    """Returns a Duration; negative times and NaN become 0, longer ones `MAX_S`."""
    whole = Duration()
    whole.FromNanoseconds(int(min(MAX_S, max(0.0, seconds)) * 1e9))
    return whole


def seconds(message: Duration) -> float:
    """Returns the seconds of a Duration."""
    return message.seconds + message.nanos / 1e9
