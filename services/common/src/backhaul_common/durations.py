"""Between seconds and protobuf's Duration."""

from google.protobuf.duration_pb2 import Duration


def duration(seconds: float) -> Duration:
    """Returns a Duration; negative times become 0."""
    whole = Duration()
    whole.FromNanoseconds(int(max(0.0, seconds) * 1e9))
    return whole


def seconds(message: Duration) -> float:
    """Returns the seconds of a Duration."""
    return message.seconds + message.nanos / 1e9
