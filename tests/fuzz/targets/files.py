"""Files that operators write: settings, tenants, routing, keys and certificates, and traces of turns."""

import base64
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import ValidationError

from backhaul_common.errors import InvalidArgumentError
from backhaul_common.tls.files import TlsFiles, read_material
from backhaul_common.toml import parse_toml
from backhaul_replay.trace import TraceError, parse
from backhaul_router.config import Config
from backhaul_router.core.routing.settings import parse_routing
from backhaul_router.core.tenants import parse_tenants
from tests.fuzz.inputs import DEEP, Source, made_of, one_of, samples_of
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

_TOKENS = b"""jwt_names = ["app"]
[jwt]
issuer = "https://login.example"
audience = ["backhaul"]
keys_file = "jwks.json"
tenant_claim = "azp"
leeway_s = 30
"""

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


_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
_FROM = datetime(2026, 1, 1, tzinfo=UTC)


def _certificate() -> bytes:
    """Returns one that is its own CA's, the same each time."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    builder = x509.CertificateBuilder(name, name, _KEY.public_key(), 7, _FROM, _FROM + timedelta(days=90))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return builder.sign(_KEY, None).public_bytes(Encoding.DER)


def _pem(label: str, der: bytes) -> Source[bytes]:
    def armoured(data: bytes) -> bytes:
        return f"-----BEGIN {label}-----\n{base64.encodebytes(data).decode()}-----END {label}-----\n".encode()

    sound = armoured(der)
    return one_of(lambda chance: sound, samples_of(sound), made_of(samples_of(der), armoured))


_CERTS = _pem("CERTIFICATE", _certificate())
_KEYS = _pem("PRIVATE KEY", _KEY.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()))


def _tls_files(chance: Random) -> tuple[bytes, bytes, bytes]:
    return _CERTS(chance), _KEYS(chance), _CERTS(chance)


def _tls(given: tuple[bytes, bytes, bytes]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("cert", "key", "ca")]
        for path, data in zip(paths, given, strict=True):
            path.write_bytes(data)
        try:
            read_material(TlsFiles(**{path.name: str(path) for path in paths}), _FROM + timedelta(days=1))
        except InvalidArgumentError:
            return False
    return True


TARGETS = (
    Target("settings files", ("backhaul_common.toml:parse_toml",), samples_of(_SETTINGS, _SETTINGS, *_DEEP), _settings),
    Target(
        "tenants files",
        ("backhaul_router.core.tenants:parse_tenants", "backhaul_router.core.token_settings:token_settings"),
        samples_of(_TENANTS, _TENANTS + _TOKENS, *_DEEP),
        _tenants,
    ),
    Target(
        "routing files",
        ("backhaul_router.core.routing.settings:parse_routing",),
        samples_of(_ROUTING, _ROUTING, *_DEEP),
        _routing,
    ),
    Target("TLS files", ("backhaul_common.tls.files:read_material",), _tls_files, _tls),
    Target("replay traces", ("backhaul_replay.trace:_turn",), samples_of(_TRACE, *_ODD_TRACES), _trace),
)
