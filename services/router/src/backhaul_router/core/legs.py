"""Shapes of the two legs: what each engine is sent, and what becomes of its reply."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backhaul_connector.wire import MAX_CONTINUES, PARAMS_KEY, TurnLabel, Verdict
from backhaul_router.core import messages, responses
from backhaul_router.core.body import Endpoint, TurnBody
from backhaul_router.core.kinds import constrained
from backhaul_router.core.usage import PromptUsage, ReplyUsage

Params = Mapping[str, msgspec.Raw]
"""kv_transfer_params of a decode leg, each value as the prefill engine wrote it."""

MAX_TOKENS = 2**31 - 1
"""An engine that counts more tokens is wrong; the gRPC API has no larger counts either."""

_PARAMS = "kv_transfer_params"

_SESSION = "session_id"
_LABEL = "backhaul"

_REQUEST_ID = "request_id"
_XARGS = "vllm_xargs"

_NEVER_SENT = (_PARAMS, "ec_transfer_params", _REQUEST_ID, _SESSION)
"""Topology and identity are ours: from a client they would name hosts to connect to, or another request or turn."""

_DECODE_ONLY = (
    "stream_interval",
    "n",
    "best_of",
    # Validity or effect depends on how many tokens come out: here it is one.
    "min_tokens",
    "thinking_token_budget",
    "length_penalty",
    "repetition_detection",
    # A stop string is an abort inside vLLM (v1/engine/output_processor.py), which hands nothing off.
    "stop",
    "include_stop_str_in_output",
    # Nobody reads the prefill engine's one token.
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
)

_COLD_PARAMS = msgspec.json.encode(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)

_OF_TOKENS = ("model", "priority")
"""What a request that gives the prompt as tokens keeps. All else shapes the prompt, or the token that nobody reads."""

_ONE, _NULL = msgspec.Raw(b"1"), msgspec.Raw(b"null")

_TOKENIZED = (
    "model",
    "messages",
    "prompt",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
)

_OF_CHAT = ("documents", "reasoning_effort")
"""Fields of chat that reach its template as arguments; an empty one does, too, a null does not (`merge_kwargs`)."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class HandOff:
    """What a prefill engine answered."""

    params: Params | None
    """vLLM's kv_transfer_params for the decode leg; None when there are none."""
    verdict: Verdict | None
    """What the connector says became of the prompt; None when the engine runs without it."""
    usage: PromptUsage | None
    """None when unknown."""
    failed: bool
    """Whether the engine says that the request failed although it answered 200."""

    @property
    def name(self) -> tuple[str, str] | None:
        """Engine and id under which the blocks are kept; None when none are, or it cannot be told."""
        params = self.params or {}
        try:
            return _decode_text(params["remote_engine_id"]), _decode_text(params["remote_request_id"])
        except (KeyError, msgspec.MsgspecError, ValueError):
            return None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Reply(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[_Choice] = []


_decode_usage = msgspec.json.Decoder(ReplyUsage | None).decode
_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_verdict = msgspec.json.Decoder(Verdict).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_xargs = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode


def prefill_body(
    body: TurnBody, *, handle: str | None, cache_salt: str, keep_constraints: Collection[str] = ()
) -> bytes:
    """Returns the prefill leg: valid whenever the client's request is, one token, no stream, the same prompt tokens.

    ``handle`` is the JSON object of a claim, None for a cold leg. Forced tools and response formats are left out,
    except for models whose name contains one of ``keep_constraints``: their chat template shows them to the model
    (`renderers/kimi_k3.py`), and leaving them out would change the prompt.
    """
    fields = _for_engine(body, cache_salt)
    for name in ("stream", "stream_options"):
        fields.pop(name, None)
    _PREFILL[body.endpoint](fields, body.fields, constrained=constrained(body, keep_constraints))
    fields[_PARAMS] = msgspec.Raw(_COLD_PARAMS if handle is None else handle.encode())
    return _encode(fields)


def _prefill_completion(raw: dict[str, msgspec.Raw], fields: Mapping[str, Any], *, constrained: bool) -> None:
    """Makes a prefill leg of a request's fields."""
    for name in _DECODE_ONLY:
        raw.pop(name, None)
    if not constrained:
        raw.pop("response_format", None)
        if fields.get("tool_choice") not in (None, "none", "auto"):
            # Null keeps the tools in the prompt; "none" may remove them (--exclude-tools-when-tool-choice-none).
            raw["tool_choice"] = _NULL
    raw["max_tokens"] = _ONE
    raw.pop("max_completion_tokens", None)


def _prefill_chat(raw: dict[str, msgspec.Raw], fields: Mapping[str, Any], *, constrained: bool) -> None:
    _prefill_completion(raw, fields, constrained=constrained)
    raw["max_completion_tokens"] = _ONE


_PREFILL = {
    Endpoint.CHAT: _prefill_chat,
    Endpoint.COMPLETIONS: _prefill_completion,
    Endpoint.RESPONSES: responses.prefill,
    Endpoint.MESSAGES: messages.prefill,
}


def token_prefill_body(body: TurnBody, token_ids: Sequence[int], *, handle: str, cache_salt: str) -> bytes:
    """Returns a prefill leg for `/v1/completions` with exactly these tokens as its prompt."""
    fields = {
        name: value for name, value in _for_engine(body, cache_salt).items() if name in (*_OF_TOKENS, "cache_salt")
    }
    fields |= {"prompt": msgspec.Raw(_encode(token_ids)), "max_tokens": _ONE, _PARAMS: msgspec.Raw(handle.encode())}
    return _encode(fields)


def decode_body(
    body: TurnBody,
    *,
    params: Params | None,
    scope: str,
    keys: Sequence[str],
    continues: Sequence[str] = (),
    traceparent: str = "",
    cache_salt: str,
    labelled: bool = False,
    response_id: str = "",
) -> bytes:
    """Returns the decode leg: the client's request with the prefill engine's params and the turn's label.

    ``continues`` are the keys by which the turn before was looked up, best first; the first few are told.
    ``traceparent`` names the turn's span, where it is recorded.
    Complete enough for the engine to compute everything on its own. Without ``params`` there is no label either, but
    for an engine without the connector (``labelled``): that one repeats ``session_id`` with what it caches
    (`distributed/kv_events.py`, ``BlockStored``). ``response_id`` is the name of the answer, where it is to have one.
    """
    fields = _for_engine(body, cache_salt)
    if labelled and keys:
        _name_session(body, fields, ":".join((_LABEL, scope, *keys)))
    if response_id:
        fields[_REQUEST_ID] = msgspec.Raw(_encode(response_id))
    if params is not None:
        label = TurnLabel(
            scope=scope, keys=list(keys), continues=list(continues[:MAX_CONTINUES]), traceparent=traceparent
        )
        fields[_PARAMS] = msgspec.Raw(_encode({**params, PARAMS_KEY: msgspec.Raw(_encode(label))}))
    return _encode(fields)


def _name_session(body: TurnBody, fields: dict[str, msgspec.Raw], name: str) -> None:
    """Names a turn in vLLM's own way (`entrypoints/generate/base/serving.py`, ``_get_session_id``)."""
    if body.endpoint is Endpoint.MESSAGES:
        # There is no such field there.
        given = _decode_xargs(fields.get(_XARGS, b"{}")) or {}
        fields[_XARGS] = msgspec.Raw(_encode({**given, _SESSION: name}))
    else:
        fields[_SESSION] = msgspec.Raw(_encode(name))


def tokenize_body(body: TurnBody) -> bytes:
    """Returns the `/tokenize` request that gives the prompt's token ids.

    That endpoint knows fewer fields than chat; the others reach the template the way chat hands them on
    (`entrypoints/openai/chat_completion/protocol.py`, ``build_chat_params``).
    """
    other = "prompt" if body.endpoint is Endpoint.CHAT else "messages"
    fields: dict[str, Any] = {name: body.raw[name] for name in _TOKENIZED if name in body.raw and name != other}
    extras = {name: body.fields[name] for name in _OF_CHAT if body.fields.get(name) is not None}
    if extras and body.endpoint is Endpoint.CHAT:
        given = body.fields.get("chat_template_kwargs") or {}
        if "reasoning_effort" in extras and "enable_thinking" not in given:
            extras["enable_thinking"] = extras["reasoning_effort"] != "none"
        fields["chat_template_kwargs"] = {**given, **extras}
    return _encode(fields)


def prompt_tokens_in(body: TurnBody) -> list[int] | None:
    """Returns the prompt's token ids when the client sent them as such."""
    prompt = body.fields.get("prompt") if body.endpoint is Endpoint.COMPLETIONS else None
    return prompt if isinstance(prompt, list) and all(isinstance(item, int) for item in prompt) else None


def hand_off(reply: bytes) -> HandOff:
    """Reads a prefill engine's reply. Whatever is missing or odd in it means that there is no hand-off."""
    try:
        parsed = _decode_reply(reply)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return HandOff(None, None, None, failed=False)
    params = dict(parsed.kv_transfer_params or {})
    verdict = _verdict(params.pop(PARAMS_KEY, None))
    failed = any(choice.finish_reason == "error" for choice in parsed.choices)
    return HandOff(params or None, verdict, _prompt_usage(_usage(parsed.usage), verdict), failed)


def is_object(text: str | bytes) -> bool:
    """Tells whether a text is one JSON object."""
    try:
        _decode_fields(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


def _for_engine(body: TurnBody, cache_salt: str) -> dict[str, msgspec.Raw]:
    return for_engine(body.raw, body.fields, cache_salt)


def for_engine(raw: Mapping[str, msgspec.Raw], fields: Mapping[str, Any], cache_salt: str) -> dict[str, msgspec.Raw]:
    """Returns what of a client's body any engine may be sent, with the cache salt if there is one."""
    sent = {name: value for name, value in raw.items() if name not in _NEVER_SENT}
    extra = fields.get(_XARGS)
    if extra:
        # vLLM merges these over its own arguments, kv_transfer_params among them.
        sent[_XARGS] = msgspec.Raw(_encode({k: v for k, v in extra.items() if k not in _NEVER_SENT}))
    if cache_salt:
        sent["cache_salt"] = msgspec.Raw(_encode(cache_salt))
    return sent


def _prompt_usage(usage: PromptUsage | None, verdict: Verdict | None) -> PromptUsage | None:
    if verdict is None:
        return usage
    details = usage.details if usage else b"null"
    if details == b"null":
        # The engine does not tell (`--enable-prompt-tokens-details`), but its connector does.
        details = _encode({"cached_tokens": verdict.local + verdict.read})
    return PromptUsage(verdict.prompt, details)


def _verdict(raw: msgspec.Raw | None) -> Verdict | None:
    if raw is None:
        return None
    try:
        verdict = _decode_verdict(raw)
    except (msgspec.MsgspecError, ValueError):
        return None
    counts = (verdict.prompt, verdict.local, verdict.read)
    return verdict if all(0 <= count <= MAX_TOKENS for count in counts) else None


def _usage(raw: msgspec.Raw) -> PromptUsage | None:
    try:
        usage = _decode_usage(raw)
    except (msgspec.MsgspecError, ValueError):
        return None
    return usage.prompt if usage and usage.prompt.token_count <= MAX_TOKENS else None
