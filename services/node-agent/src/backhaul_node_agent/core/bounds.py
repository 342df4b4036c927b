"""What is believed of an engine, its connector and its server: numbers and texts within bounds, and nothing else.

All of it ends up in messages of the registry and of this agent: numbers must fit there, texts must be what the registry
accepts (backhaul_registry/core/rules.py; services never import one another, a test keeps both equal). A record that the
registry refuses would take the whole node out, so what is out of bounds never gets past the agent's border.

Every check raises OutOfBoundsError.
"""

from backhaul_common.texts import clip

MAX_TEXT_BYTES = 1_024
"""Longest text in a node's record."""

MAX_ITEMS = 256
"""Models, and engines, of one record."""

MAX_RECORD_BYTES = 64 * 1024
"""Size of a node's record."""

MAX_SET_ID_BYTES = 256
MAX_HAND_OFF_ID_BYTES = 512

MAX_COUNT = 2**31 - 1
"""The protos count in int32."""

MAX_BLOCKS = 2**24
"""Blocks of an engine that retains sets: its budget takes 16 bytes for each, at once."""

MAX_RANK = 2**16 - 1
MAX_PORT = 2**16 - 1
MAX_TP_SIZE = 1_024

_YEAR_S = 365 * 86_400.0
_MAX_CLOCK_S = 1e10
"""Most that a monotonic clock shows, about 300 years."""
_MAX_SHOWN_BYTES = 64


class OutOfBoundsError(ValueError):
    """Something that no engine says in earnest."""


def check_text(value: str, field: str, *, required: bool = False) -> None:
    """Accepts text of up to 1,024 bytes."""
    size = len(value.encode())
    low = 1 if required else 0
    if not low <= size <= MAX_TEXT_BYTES:
        raise OutOfBoundsError(f"{field} has {size} bytes, not {low} to {MAX_TEXT_BYTES}")


def check_count(value: int, field: str, *, least: int = 0, most: int = MAX_COUNT) -> None:
    """Accepts an int32 that is not negative, or a narrower range."""
    if not least <= value <= most:
        raise OutOfBoundsError(f"{field} is {_shown(value)}, not {least} to {most}")


def check_span(value_s: float, field: str) -> None:
    """Accepts seconds up to a year."""
    if not 0.0 <= value_s <= _YEAR_S:
        raise OutOfBoundsError(f"{field} is {_shown(value_s)} s, not 0 to {_YEAR_S:.0f}")


def check_instant(value_s: float, field: str) -> None:
    """Accepts what a monotonic clock can show."""
    if not -_MAX_CLOCK_S <= value_s <= _MAX_CLOCK_S:
        raise OutOfBoundsError(f"{field} is {_shown(value_s)} s, which no clock shows")


def check_request_id(value: str, field: str, *, most_bytes: int) -> None:
    """Accepts a request id of vLLM that a NIXL notification can carry.

    Notifications are ``HB:<id>,<id>`` and ``<id>:<count>`` (nixl/pull_worker.py, ``_get_new_notifs``): an id with a
    comma or a colon would be read as other requests' ids.
    """
    sound = value.isprintable() and "," not in value and ":" not in value
    if not sound or not 1 <= len(value.encode()) <= most_bytes:
        raise OutOfBoundsError(f"{field} must have 1 to {most_bytes} bytes, all printable, without commas and colons")


def _shown(value: float) -> str:
    return clip(str(value), _MAX_SHOWN_BYTES)
