"""Bodies of vLLM's HTTP requests: the fields that are looked at. All others are ignored, as in vLLM."""

import re
from typing import Any, TypeVar

import msgspec

from backhaul_simulator.openai_errors import malformed


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream says besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and completions share."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    cache_salt: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    session_id: str | None = None
    echo: bool | None = False
    use_beam_search: bool = False


class Chat(Body, frozen=True, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, str]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Completion(Body, frozen=True, kw_only=True):
    """``/v1/completions``."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None


class ChatToTokenize(msgspec.Struct, frozen=True, kw_only=True):
    """``/tokenize`` of a chat."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TextToTokenize(msgspec.Struct, frozen=True, kw_only=True):
    """``/tokenize`` of a text."""

    prompt: str
    model: str | None = None


class TokensToText(msgspec.Struct, frozen=True, kw_only=True):
    """``/detokenize``."""

    tokens: list[int]
    model: str | None = None


_Parsed = TypeVar("_Parsed")

_FIELD = re.compile(r"missing required field `(\w+)`|at `\$\.([^`]+)`")


def parse(raw: bytes, kind: type[_Parsed]) -> _Parsed:
    """Reads a body. Raises RefusedError for one that is not valid."""
    try:
        return msgspec.json.decode(raw, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        found = _FIELD.search(str(error))
        raise malformed(str(error), f"body.{found[1] or found[2]}" if found else "body") from error
