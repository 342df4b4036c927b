"""What vLLM 0.32 refuses (``entrypoints/openai/*/protocol.py``, ``sampling_params.py``, ``renderers/params.py``)."""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from backhaul_simulator.openai_bodies import Body, Chat, StreamOptions
from backhaul_simulator.openai_errors import RefusedError, malformed, not_valid
from backhaul_simulator.tokens import MAX_TOKEN_CHARS

_MAX_SALT = 128
_SALT_FORBIDDEN = frozenset("@/\\\0")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the server serves."""

    model: str
    max_model_len: int
    vocabulary: int
    template: str = "whole"
    """What of a chat's history becomes prompt: one of `tokens.TEMPLATES`."""


def check_model(model: str | None, served: Served) -> None:
    """Raises RefusedError for a model that is not served."""
    if model and model != served.model:
        message = f"The model `{model}` does not exist. Valid aliases: {served.model}."
        raise RefusedError(message, status=404, kind="NotFoundError", param="model")


def check_body(body: Body, served: Served) -> None:
    """Checks in the order in which vLLM does: the body's fields, then the model, then what sampling allows.

    Raises RefusedError.
    """
    if body.stream_options not in (None, StreamOptions()) and not body.stream:
        raise not_valid("Stream options can only be defined when `stream=True`.", "stream_options")
    _check_salt(body.cache_salt)
    if body.prompt_logprobs and body.stream:
        raise not_valid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    check_model(body.model, served)
    if body.use_beam_search or body.prompt_logprobs:
        message = "the simulator has neither beam search nor logprobs of prompts"
        raise RefusedError(message, status=501, kind="NotImplementedError")
    _check_sampling(body)


def _check_sampling(body: Body) -> None:
    temperature = 1.0 if body.temperature is None else body.temperature
    if not math.isfinite(temperature) or not 0 <= temperature <= 2:
        raise not_valid(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise RefusedError(f"top_p must be in (0, 1], got {body.top_p}.")
    for name in ("presence_penalty", "frequency_penalty"):
        if abs(penalty := getattr(body, name) or 0.0) > 2:
            raise RefusedError(f"{name} must be in [-2, 2], got {penalty}.")
    choices = 1 if body.n is None else body.n
    if choices < 1:
        raise not_valid(f"n must be at least 1, got {choices}.", "n")
    if choices > 1 and temperature == 0:
        raise RefusedError(f"n must be 1 when using greedy sampling, got {choices}.")
    if body.min_tokens < 0:
        raise RefusedError(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if any(not text for text in stop_strings(body)):
        raise RefusedError("stop cannot contain an empty string.")


def _check_salt(salt: Any) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise not_valid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > _MAX_SALT or set(salt) & _SALT_FORBIDDEN:
        message = "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL."
        raise not_valid(message, "cache_salt")


def check_chat(body: Chat) -> None:
    """Checks what only chats have. Raises RefusedError."""
    if body.top_logprobs and not body.logprobs:
        raise not_valid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if body.continue_final_message and body.add_generation_prompt:
        raise not_valid("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", None)
    if body.response_format and body.response_format.get("type") not in _FORMATS:
        raise malformed(f"Invalid response format: {body.response_format.get('type')}", "body.response_format")
    _check_tools(body)


def _check_tools(body: Chat) -> None:
    if body.tools == []:
        raise not_valid("`tools` must not be an empty array.", "tools")
    choice = body.tool_choice
    if choice in (None, "none"):
        return
    if not body.tools:
        raise not_valid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, str):
        if choice not in ("auto", "required"):
            raise not_valid(f"Invalid value for `tool_choice`: {choice}!", "tool_choice")
        return
    names = [name_of(tool) for tool in body.tools]
    if not name_of(choice) or name_of(choice) not in names:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise not_valid(message, "tool_choice")


def name_of(tool: dict[str, Any]) -> str:
    """Returns the name of a tool's function, or of a tool choice's; empty when there is none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def all_ids(items: list[Any]) -> bool:
    """Tells whether a list is a prompt of token ids."""
    return bool(items) and all(type(item) is int for item in items)


def check_ids(tokens: list[int], served: Served) -> None:
    """Raises RefusedError for a token id that the model does not have."""
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < served.vocabulary:
            raise not_valid(f"Token id {token} is out of vocabulary")


def check_length(chars: int, served: Served) -> None:
    """Raises RefusedError for a text that is too long to be worth tokenizing."""
    longest = served.max_model_len * MAX_TOKEN_CHARS
    if chars > longest:
        _too_long(f"{chars} characters (more than {longest} characters)", "input_text", served)


def stop_strings(body: Body) -> tuple[str, ...]:
    """Returns the stop strings."""
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def max_tokens(prompt_tokens: int, limit: int | None, min_tokens: int, served: Served) -> int:
    """Returns how long the answer may be (``get_max_tokens``, then ``SamplingParams``). Raises RefusedError."""
    if not prompt_tokens:
        raise RefusedError("The decoder prompt cannot be empty")
    if prompt_tokens > served.max_model_len:
        _too_long(f"{prompt_tokens} input tokens", "input_tokens", served)
    room = served.max_model_len - prompt_tokens
    allowed = room if limit is None else min(limit, room)
    if allowed < 1:
        raise not_valid(f"max_tokens must be at least 1, got {allowed}.", "max_tokens", allowed)
    if min_tokens > allowed:
        raise RefusedError(f"min_tokens must be less than or equal to max_tokens={allowed}, got {min_tokens}.")
    return allowed


def _too_long(what: str, param: str, served: Served) -> NoReturn:
    message = (
        f"This model's maximum context length is {served.max_model_len} tokens. However, your prompt contains {what}, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    )
    raise not_valid(message, param)
