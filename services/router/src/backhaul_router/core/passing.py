"""Requests that are no turns: what is passed on to one engine, and what an engine is sent of it.

Only what is listed here is passed on. An engine has paths that must not be open to clients (to read and load weights,
to sleep, to empty caches), and some that take handles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from backhaul_router.core.errors import invalid
from backhaul_router.core.legs import for_engine
from backhaul_router.core.shape import check_shape

_OF_TOKENS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_POOLING = (
    "/v1/embeddings",
    "/v2/embed",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/classify",
    "/pooling",
)
"""For models that pool (`entrypoints/pooling`). They cache prompts, too, and take a cache salt."""

PASSED = (*_OF_TOKENS, *_POOLING)
"""Paths that are passed on as they are."""

RESPONSES = "/v1/responses/"
"""What begins so is passed on to the engine that keeps the response."""

_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class PassedBody:
    """A body that is passed on."""

    path: str
    raw: Mapping[str, msgspec.Raw]
    fields: Mapping[str, Any]

    @property
    def model(self) -> str:
        """Requested model or adapter."""
        return str(self.fields["model"])

    @property
    def client_salt(self) -> str:
        """The client's own cache salt; empty for none."""
        return str(self.fields.get("cache_salt") or "")

    def for_engine(self, cache_salt: str) -> bytes:
        """Returns what the engine is sent."""
        salt = cache_salt if self.path in _POOLING else ""
        return msgspec.json.encode(for_engine(self.raw, self.fields, salt))


def parse_passed(path: str, data: bytes) -> PassedBody:
    """Parses a body as far as it must be known. Raises ApiError (400)."""
    try:
        fields, raw = _decode(data), _decode_raw(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid(f"the body is not a valid JSON object: {error}") from error
    check_shape(data, fields)
    if not isinstance(fields.get("model"), str) or not fields["model"]:
        raise invalid("you must provide a model", param="model")
    for name, kind in (("cache_salt", str), ("vllm_xargs", dict)):
        if not isinstance(fields.get(name), kind | None):
            raise invalid(f"'{name}' must be {'a string' if kind is str else 'an object'}", param=name)
    return PassedBody(path, raw, fields)
