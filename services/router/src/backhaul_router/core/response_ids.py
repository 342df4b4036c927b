"""Names of responses: they say which engine keeps one, to routers alone, and only for the tenant that it was given to.

vLLM keeps responses in the memory of one server, for whoever knows a name, and takes the names that it is told
(`entrypoints/openai/responses/protocol.py`, ``request_id``). An engine's id is new at every start, so a name
from before a restart leads nowhere; without one nobody can make up a name.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable

from backhaul_router.core.nodes import Node

_PREFIX = "resp_"
_NONCE_CHARS = 32
_NONCE = re.compile(f"[0-9a-f]{{{_NONCE_CHARS}}}")
_TAG_BYTES = 16


def response_id_of(node: Node, tenant: str, nonce: str) -> str:
    """Returns the name of a response that a node's engine gives a tenant; empty when the node has not named its engine.

    ``nonce``: 32 hexadecimal digits that no other response has.
    """
    return f"{_PREFIX}{nonce}{_tag(node.engines[0].engine_id, tenant, nonce)}" if node.engines else ""


def keeper_of(response_id: str, tenant: str, nodes: Iterable[Node]) -> Node | None:
    """Returns the node whose engine gave a tenant this response; None when there is none."""
    nonce, tag = response_id.removeprefix(_PREFIX)[:_NONCE_CHARS], response_id[len(_PREFIX) + _NONCE_CHARS :]
    if not _NONCE.fullmatch(nonce):
        return None
    for node in nodes:
        for engine in node.engines:
            made = _tag(engine.engine_id, tenant, nonce)
            if hmac.compare_digest(made.encode(), tag.encode("utf-8", "surrogatepass")):
                return node
    return None


def _tag(engine_id: str, tenant: str, nonce: str) -> str:
    state = hashlib.blake2b(digest_size=_TAG_BYTES, person=b"backhaul-respons")
    for part in (engine_id, tenant, nonce):
        text = part.encode("utf-8", "surrogatepass")
        state.update(len(text).to_bytes(8, "big"))
        state.update(text)
    return state.hexdigest()
