"""The client's request body: checked once, its values kept as the bytes that came."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from backhaul_router.core import messages, responses
from backhaul_router.core.errors import invalid
from backhaul_router.core.shape import check_shape


class Endpoint(Enum):
    """Endpoints that run a turn; the value is the path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"

    # They key what every turn looks up, and there is one of each: an enumeration's own hash is a function in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class TurnBody:
    """A valid request body."""

    endpoint: Endpoint
    raw: Mapping[str, msgspec.Raw]
    """Top-level fields as the client wrote them."""
    fields: Mapping[str, Any]
    """The same, decoded."""

    @property
    def model(self) -> str:
        """Requested model or adapter."""
        return str(self.fields["model"])

    @property
    def stream(self) -> bool:
        """Whether the client wants server-sent events."""
        return bool(self.fields.get("stream"))

    @property
    def previous_response_id(self) -> str:
        """The response that this turn goes on from; empty for none."""
        return str(self.fields.get("previous_response_id") or "") if self.endpoint is Endpoint.RESPONSES else ""

    @property
    def cache_salt(self) -> str:
        """The client's own salt; empty for none."""
        return str(self.fields.get("cache_salt") or "")


_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(dict[str, Any]).decode

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "stream": ((bool,), "a boolean"),
    "n": ((int,), "an integer"),
    "best_of": ((int,), "an integer"),
    "max_tokens": ((int,), "an integer"),
    "max_completion_tokens": ((int,), "an integer"),
    "truncate_prompt_tokens": ((int,), "an integer"),
    "temperature": ((int, float), "a number"),
    "top_p": ((int, float), "a number"),
    "tools": ((list,), "an array"),
    "stream_options": ((dict,), "an object"),
    "cache_salt": ((str,), "a string"),
    "session_id": ((str,), "a string"),
    "chat_template": ((str,), "a string"),
    "chat_template_kwargs": ((dict,), "an object"),
    "vllm_xargs": ((dict,), "an object"),
}

_TYPES_OF: dict[Endpoint, dict[str, tuple[tuple[type, ...], str]]] = {
    Endpoint.RESPONSES: {
        "max_output_tokens": ((int,), "an integer"),
        "previous_response_id": ((str,), "a string"),
        "instructions": ((str,), "a string"),
        "background": ((bool,), "a boolean"),
        "store": ((bool,), "a boolean"),
        "text": ((dict,), "an object"),
    },
    Endpoint.MESSAGES: {"thinking": ((dict,), "an object"), "output_config": ((dict,), "an object")},
}


def parse_body(endpoint: Endpoint, data: bytes) -> TurnBody:
    """Parses and checks a body, as far as a later refusal by an engine would waste work.

    Raises ApiError (400) naming the field that is wrong.
    """
    try:
        fields, raw = _decode(data), _decode_raw(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid(f"the body is not a valid JSON object: {error}") from error
    check_shape(data, fields)
    _check_types(fields, {**_TYPES, **_TYPES_OF.get(endpoint, {})})
    if not isinstance(fields.get("model"), str) or not fields["model"]:
        raise invalid("you must provide a model", param="model")
    _CHECKS[endpoint](fields)
    return TurnBody(endpoint, raw, fields)


def _check_types(fields: Mapping[str, Any], wanted_types: Mapping[str, tuple[tuple[type, ...], str]]) -> None:
    for name, (types, wanted) in wanted_types.items():
        value = fields.get(name)
        # A boolean is an int for Python, but not for the API.
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise invalid(f"'{name}' must be {wanted}", param=name)
    if fields.get("stream_options") and not fields.get("stream"):
        raise invalid("'stream_options' needs 'stream': true", param="stream_options")


def _check_messages(fields: Mapping[str, Any]) -> None:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("'messages' must be a non-empty array", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"'messages[{index}]' must be an object with a role", param=f"messages[{index}]")
        if not isinstance(message.get("content"), str | list | None):
            raise invalid(f"'messages[{index}].content' must be a string or an array", param=f"messages[{index}]")


def _check_prompt(fields: Mapping[str, Any]) -> None:
    if fields.get("prompt_embeds"):
        return
    if not isinstance(fields.get("prompt"), str | list) or not fields["prompt"]:
        raise invalid("'prompt' must be a non-empty string or array", param="prompt")


_CHECKS: dict[Endpoint, Callable[[Mapping[str, Any]], None]] = {
    Endpoint.CHAT: _check_messages,
    Endpoint.COMPLETIONS: _check_prompt,
    Endpoint.RESPONSES: responses.check,
    Endpoint.MESSAGES: messages.check,
}
