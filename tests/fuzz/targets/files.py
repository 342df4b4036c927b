"""Files that operators write: settings, tenants, routing, and traces of turns."""

from pydantic import ValidationError

from backhaul_common.toml import parse_toml
from backhaul_replay.trace import TraceError, parse
from backhaul_router.config import Config
from backhaul_router.core.routing.settings import parse_routing
from backhaul_router.core.tenants import parse_tenants
from tests.fuzz.inputs import DEEP, samples_of
from tests.fuzz.target import Target

_DEEP = tuple(f"x = {'[' * depth}{']' * depth}\n".encode() for depth in DEEP)

_SETTINGS = b"""registry = ["127.0.0.1:7100"]
listen_http = "127.0.0.1:8080"
body_limit = "16MiB"
max_turns = 10
prefer = "warm"
routes = "cold,warm"
lookup_budget_s = 0.05
"""

_TENANTS = b"""[tenants.acme]
key_sha256 = ["%s"]
max_turns = 10
priority = 1
[tenants."b.c"]
key_sha256 = ["%s"]
""" % (b"a" * 64, b"0" * 64)

_ROUTING = b"""[limits]
alone_tokens = 64
[prefill]
filters = ["healthy", "max-waiting"]
max_waiting = 5
scorers = [{ type = "time", weight = 1.0 }]
picker = { type = "best" }
[breaker]
window_s = 30.0
"""

_TRACE = b"""{"conversation": "a", "prompt_tokens": 10, "output_tokens": 5, "arrival_s": 0.5, "scope": "s"}
{"conversation": "a", "prompt_tokens": 20, "output_tokens": 5, "gap_s": 1, "scope": "s"}
{"conversation": "b", "prompt_tokens": 10, "output_tokens": 5, "arrival_s": 1e2}
"""
_ODD_TRACES = (
    *(b'{"conversation": ' + b"[" * depth + b"]" * depth + b"}\n" for depth in DEEP),
    _TRACE.replace(b"0.5", b"9" * 400),
    _TRACE.replace(b"10", b"9" * 5_000),
    _TRACE.replace(b"0.5", b"NaN"),
)


def _text(data: bytes) -> str:
    # As whoever opens the file does; ValueError is a refusal.
    return data.decode()


def _settings(data: bytes) -> bool:
    try:
        Config(**parse_toml(_text(data)))
    except (ValidationError, ValueError):
        return False
    return True


def _tenants(data: bytes) -> bool:
    try:
        tenants = parse_tenants(_text(data))
    except ValueError:
        return False
    assert tenants.configured
    return True


def _routing(data: bytes) -> bool:
    try:
        parse_routing(_text(data))
    except ValueError:
        return False
    return True


def _trace(data: bytes) -> bool:
    try:
        lines = _text(data).splitlines()
    except ValueError:
        return False
    try:
        parse(lines)
    except TraceError:
        return False
    return True


TARGETS = (
    Target("settings files", ("backhaul_common.toml:parse_toml",), samples_of(_SETTINGS, _SETTINGS, *_DEEP), _settings),
    Target(
        "tenants files",
        ("backhaul_router.core.tenants:parse_tenants",),
        samples_of(_TENANTS, _TENANTS, *_DEEP),
        _tenants,
    ),
    Target(
        "routing files",
        ("backhaul_router.core.routing.settings:parse_routing",),
        samples_of(_ROUTING, _ROUTING, *_DEEP),
        _routing,
    ),
    Target("replay traces", ("backhaul_replay.trace:_turn",), samples_of(_TRACE, *_ODD_TRACES), _trace),
)
