"""Pointers as conversations leave them, made up: each follows from its number, so that nothing need be remembered."""

import hashlib
import uuid

from backhaul_registry.core.model import Pointer

CLUSTER = "bench"
SCOPE = hashlib.blake2b(b"scope", digest_size=16).hexdigest()
TRACEPARENT = f"00-{'4b' * 16}-{'f0' * 8}-01"
_ENGINES = 64


def key_of(number: int) -> str:
    """Returns the lookup key of a pointer, which looks random: neighbours are far apart in etcd."""
    return _digest(b"key", number).hex()


def engine_of(number: int) -> tuple[str, str]:
    """Returns the node and the engine of a pointer."""
    place = number % _ENGINES
    return f"decode-{place}", str(uuid.UUID(bytes=_digest(b"engine", place)))


def pointer_of(number: int, *, traced: bool = False) -> Pointer:
    """Returns a whole pointer; ``traced``: of a turn whose trace was recorded."""
    node_id, engine_id = engine_of(number)
    request = _digest(b"request", number).hex()
    return Pointer(
        scope=SCOPE,
        key=key_of(number),
        # vLLM's id of a chat completion (entrypoints/openai/chat_completion/serving.py) and what its engine appends.
        set_id=f"chatcmpl-{request}-{request[:8]}",
        engine_id=engine_id,
        node_id=node_id,
        token_count=4096 + number % 4096,
        digest=_digest(b"tokens", number),
        stride=64,
        identity=_digest(b"identity", 0),
        traceparent=TRACEPARENT if traced else "",
    )


def _digest(what: bytes, number: int) -> bytes:
    return hashlib.blake2b(what + number.to_bytes(8, "big"), digest_size=16).digest()
