"""Images, sounds and the like in requests: engines keep them by names that clients may give."""

from collections.abc import Mapping
from typing import Any

from backhaul_router.core.errors import invalid

_PROMPTS = (
    "messages",
    "system",
    "input",
    "items",
    "query",
    "queries",
    "documents",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
)
"""Fields that hold content parts, of turns and of what is passed on (`entrypoints/pooling`)."""


def check_media(fields: Mapping[str, Any]) -> None:
    """Accepts a request of one of several tenants, unless it names an image or the like (``uuid``).

    vLLM keeps media by such names, whatever the cache salt, and takes what is there for whoever names it, even if
    nothing else is sent (`renderers/chat_utils.py`; `multimodal/processing/inputs.py`, ``get_mm_hashes``). Raises
    ApiError (400).
    """
    for field in _PROMPTS:
        if _named(fields.get(field)):
            message = "a content part must not have a 'uuid' here: engines keep media by it for all tenants alike"
            raise invalid(message, param=field)


def _named(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_named, value))
    if not isinstance(value, dict):
        return False
    # What a tool gave back is content, too (`entrypoints/openai/responses/utils.py`).
    return value.get("uuid") is not None or _named(value.get("content")) or _named(value.get("output"))
