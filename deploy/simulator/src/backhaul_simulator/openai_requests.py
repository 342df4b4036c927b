"""Reads the bodies of chats and completions, as strictly as vLLM 0.32 does, and makes prompts of token ids of them.

Fields that nobody knows are ignored, as in vLLM; fields that shape probabilities (temperature, penalties, response
formats) are checked for their type and change nothing: the model knows one answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backhaul_simulator import tokens
from backhaul_simulator.openai_bodies import (
    Body,
    Chat,
    ChatToTokenize,
    Completion,
    TextToTokenize,
    TokensToText,
    parse,
)
from backhaul_simulator.openai_checks import (
    Served,
    all_ids,
    check_body,
    check_chat,
    check_ids,
    check_length,
    check_model,
    max_tokens,
    name_of,
    stop_strings,
)
from backhaul_simulator.openai_errors import RefusedError, malformed, not_valid

_MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that passed all checks."""

    chat: bool
    prompts: Sequence[list[int]]
    """Token ids; several for a completion of a list of prompts."""
    choices: int
    """Answers per prompt (``n``)."""
    max_tokens: Sequence[int]
    """One per prompt."""
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    include_stop: bool
    stop_token_ids: frozenset[int]
    stream: bool
    usage: bool
    """Whether the stream ends with the usage."""
    continuous_usage: bool
    logprobs: int | None
    """Alternatives per token; None: no logprobs at all."""
    return_token_ids: bool
    echo: str
    """Put before the answer."""
    role: str
    forced_tool: str
    """Name of the tool that must be called; empty for none."""
    tool_choice: str
    """``required``, ``named`` or empty."""
    kv_transfer_params: dict[str, Any] | None
    cache_salt: str
    session_id: str | None


def parse_chat(raw: bytes, served: Served) -> Job:
    """Reads the body of ``/v1/chat/completions``. Raises RefusedError with what vLLM answers to a bad one."""
    return chat_job(parse(raw, Chat), served)


def chat_job(body: Chat, served: Served) -> Job:
    """Returns the job of a chat. Raises RefusedError."""
    check_body(body, served)
    check_chat(body)
    params = body.kv_transfer_params
    prompt = _forwarded_prompt(params, served)
    if prompt is None:
        prompt = _chat_tokens(body, served, _extras(body))
    elif params is not None:
        params = {name: value for name, value in params.items() if name != "prompt_token_ids"}
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    choice, tool = _forced_tool(body)
    last = body.messages[-1] if body.messages else {}
    role = "assistant" if body.add_generation_prompt else str(last.get("role", "assistant"))
    return _job(
        body,
        served,
        [prompt],
        limit,
        params,
        chat=True,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        echo=str(last.get("content") or "") if body.echo and last.get("role") == role else "",
        role=role,
        forced_tool=tool,
        tool_choice=choice,
    )


def parse_completion(raw: bytes, served: Served) -> Job:
    """Reads the body of ``/v1/completions``. Raises RefusedError with what vLLM answers to a bad one."""
    body = parse(raw, Completion)
    check_body(body, served)
    prompts = _prompts(body.prompt, served)
    limit = 16 if body.max_tokens is None else body.max_tokens
    echo = body.prompt if body.echo and isinstance(body.prompt, str) else ""
    return _job(body, served, prompts, limit, body.kv_transfer_params, chat=False, logprobs=body.logprobs, echo=echo)


def parse_tokenize(raw: bytes, served: Served) -> list[int]:
    """Reads the body of ``/tokenize``; returns the token ids. Raises RefusedError."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise malformed(str(error), "body") from error
    if "messages" not in fields:
        text = parse(raw, TextToTokenize)
        check_model(text.model, served)
        return tokens.encode(text.prompt, vocabulary=served.vocabulary)
    chat = parse(raw, ChatToTokenize)
    check_model(chat.model, served)
    return _chat_tokens(chat, served, chat.chat_template_kwargs or {})


def chat_tokens(body: Chat, served: Served) -> list[int]:
    """Returns the tokens of a chat's prompt. Raises RefusedError."""
    check_model(body.model, served)
    return _chat_tokens(body, served, _extras(body))


def parse_detokenize(raw: bytes, served: Served) -> str:
    """Reads the body of ``/detokenize``; returns the text. Raises RefusedError."""
    body = parse(raw, TokensToText)
    check_model(body.model, served)
    return "".join(map(tokens.decode, body.tokens))


def _forced_tool(body: Chat) -> tuple[str, str]:
    if body.tools and body.tool_choice == "required":
        return "required", name_of(body.tools[0])
    if isinstance(body.tool_choice, dict):
        return "named", name_of(body.tool_choice)
    return "", ""


def _extras(body: Chat) -> dict[str, Any]:
    """Returns what chat hands to its template besides messages and tools (``build_chat_params``)."""
    extras = dict(body.chat_template_kwargs or {})
    if body.documents:
        extras["documents"] = body.documents
    if body.reasoning_effort:
        extras.setdefault("enable_thinking", body.reasoning_effort != "none")
        extras["reasoning_effort"] = body.reasoning_effort
    return extras


def _chat_tokens(body: Chat | ChatToTokenize, served: Served, extras: Mapping[str, Any]) -> list[int]:
    check_length(sum(len(str(message.get("content", ""))) for message in body.messages), served)
    try:
        return tokens.encode_chat(
            body.messages,
            body.tools,
            extras=extras,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            vocabulary=served.vocabulary,
            template=served.template,
        )
    except tokens.MediaError as error:
        raise RefusedError(str(error)) from error


def _forwarded_prompt(params: dict[str, Any] | None, served: Served) -> list[int] | None:
    """Returns the token ids that the prefill engine's caller passes on, so that a chat is not tokenized twice."""
    ids = (params or {}).get("prompt_token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all_ids(ids):
        message = "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of token ids"
        raise not_valid(message, "kv_transfer_params.prompt_token_ids")
    check_ids(ids, served)
    return ids


def _prompts(prompt: str | list[Any] | None, served: Served) -> list[list[int]]:
    if prompt is None or prompt == "":
        raise not_valid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str) or all_ids(prompt):
        prompt = [prompt]
    if len(prompt) > _MAX_PROMPTS:
        message = f"prompt list length {len(prompt)} exceeds the maximum allowed count of {_MAX_PROMPTS}."
        raise not_valid(message, "prompt")
    return [_prompt(item, served) for item in prompt]


def _prompt(item: Any, served: Served) -> list[int]:
    if isinstance(item, str):
        check_length(len(item), served)
        return tokens.encode(item, vocabulary=served.vocabulary)
    if not isinstance(item, list) or not all_ids(item):
        raise malformed("prompt must be a text, token ids, or a list of either", "body.prompt")
    check_ids(item, served)
    return item


def _job(
    body: Body,
    served: Served,
    prompts: Sequence[list[int]],
    limit: int | None,
    params: dict[str, Any] | None,
    *,
    chat: bool,
    logprobs: int | None,
    echo: str,
    role: str = "",
    forced_tool: str = "",
    tool_choice: str = "",
) -> Job:
    options = body.stream_options
    usage = bool(options and options.include_usage)
    return Job(
        chat=chat,
        prompts=prompts,
        choices=body.n or 1,
        max_tokens=[max_tokens(len(prompt), limit, body.min_tokens, served) for prompt in prompts],
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop=stop_strings(body),
        include_stop=body.include_stop_str_in_output,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        stream=bool(body.stream),
        usage=usage,
        continuous_usage=usage and bool(options and options.continuous_usage_stats),
        logprobs=logprobs,
        return_token_ids=bool(body.return_token_ids),
        echo=echo,
        role=role,
        forced_tool=forced_tool,
        tool_choice=tool_choice,
        kv_transfer_params=params or None,
        cache_salt=body.cache_salt or "",
        session_id=body.session_id or None,
    )
