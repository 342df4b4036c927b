"""Replies in OpenAI's form, with vLLM's additions: whole documents and the events of streams."""

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backhaul_simulator.answers import Step
from backhaul_simulator.openai_requests import Job
from backhaul_simulator.tokens import decode

DONE = b"data: [DONE]\n\n"

FINGERPRINT = "backhaul-simulator"

_LOGPROB = -0.5
"""Of every token: the model has no probabilities."""

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Choice:
    """An answer as far as it has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Progress:
    """What all choices of a reply have come to."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.choices = [Choice() for _ in range(len(job.prompts) * job.choices)]
        self.cached_tokens = 0
        """Of the first prompt that says so, as in vLLM."""
        self.kv_transfer_params: dict[str, Any] | None = None
        """Of the first prompt, as in vLLM."""

    def add(self, step: Step) -> Choice:
        """Takes a step in; returns its choice."""
        choice = self.choices[step.choice]
        choice.text = step.whole_text
        if step.token is not None:
            choice.tokens.append(step.token)
        choice.finish_reason, choice.stop_reason = step.finish_reason, step.stop_reason
        self.cached_tokens = self.cached_tokens or step.cached_tokens
        if step.prompt == 0 and step.kv_transfer_params is not None:
            self.kv_transfer_params = step.kv_transfer_params
        return choice

    def usage(self) -> dict[str, Any]:
        """Returns what was used so far."""
        prompt = sum(map(len, self._job.prompts))
        completion = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _DoneReply:
    """What streams of chats and completions share."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def accepted(self) -> Iterator[bytes]:
        """Yields nothing: nothing is said before something is computed."""
        yield from ()

    def closing(self, progress: Progress) -> Iterator[bytes]:
        """Yields the events after the last token."""
        if self._job.usage:
            yield self.ending(progress.usage())
        yield DONE

    def failed(self, document: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the events of an error (``chat_completion_stream_generator``)."""
        yield _event(document)
        yield DONE

    def ending(self, usage: Mapping[str, Any]) -> bytes:
        """Returns the event with the usage."""
        raise NotImplementedError


class ChatReply(_DoneReply):
    """Reply to ``/v1/chat/completions``."""

    prefix = "chatcmpl"

    def __init__(self, job: Job, *, reply_id: str, model: str, created: int) -> None:
        super().__init__(job)
        self._head = {"id": reply_id, "created": created, "model": model}
        self._calls = [f"chatcmpl-tool-{uuid.uuid4().hex}" for _ in range(job.choices)] if job.forced_tool else []

    def opening(self) -> Iterator[bytes]:
        """Yields the events before the first token, one role per choice."""
        ids = self._job.prompts[0] if self._job.return_token_ids else None
        for index in range(self._job.choices):
            delta = {"role": self._job.role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self._event([choice], prompt_token_ids=ids)
        for index in range(self._job.choices if self._job.echo else 0):
            delta = {"content": self._job.echo}
            yield self._event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, step: Step, *, first: bool, usage: Mapping[str, Any] | None) -> bytes:
        """Returns the event of a step; ``first`` of its choice."""
        finish = self._finish(step.finish_reason)
        forced = bool(self._job.forced_tool)
        choice: dict[str, Any] = {
            "index": step.choice,
            "delta": {"tool_calls": [self._call_piece(step, first=first)]} if forced else {"content": step.text},
            "logprobs": self._logprobs(_tokens(step)),
            "finish_reason": finish,
            "token_ids": _tokens(step) if self._job.return_token_ids else None,
        }
        if finish is not None:
            choice["stop_reason"] = step.stop_reason
        return self._event([choice], **({"usage": usage} if usage else {}))

    def ending(self, usage: Mapping[str, Any]) -> bytes:
        """Returns the event with the usage."""
        return self._event([], usage=usage, system_fingerprint=FINGERPRINT)

    def whole(self, progress: Progress) -> dict[str, Any]:
        """Returns the document of a reply that is not streamed."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(progress.choices)]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**progress.usage(), "completion_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": self._job.prompts[0] if self._job.return_token_ids else None,
            "kv_transfer_params": progress.kv_transfer_params,
        }

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": self._job.role,
            "content": self._job.echo + choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
        }
        if self._job.forced_tool:
            function = {"name": self._job.forced_tool, "arguments": json.dumps({"text": choice.text})}
            call = {"id": self._calls[index], "type": "function", "function": function}
            message |= {"content": "", "tool_calls": [call]}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": self._finish(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens if self._job.return_token_ids else None,
        }

    def _finish(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._job.tool_choice == "required" else reason

    def _call_piece(self, step: Step, *, first: bool) -> dict[str, Any]:
        arguments = step.text + ('"}' if step.finish_reason is not None else "")
        if not first:
            return {"index": 0, "function": {"arguments": arguments}}
        function = {"name": self._job.forced_tool, "arguments": '{"text": "' + arguments}
        return {"index": 0, "id": self._calls[step.choice], "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        if self._job.logprobs is None:
            return None
        content = []
        for token in tokens:
            top = [_chat_logprob(text, at) for text, at in _alternatives(token, self._job.logprobs)]
            content.append({**_chat_logprob(decode(token), _LOGPROB), "top_logprobs": top})
        return {"content": content}

    def _event(self, choices: Iterable[Mapping[str, Any]], **more: Any) -> bytes:
        return _event({**self._head, "object": "chat.completion.chunk", "choices": choices, **more})


class CompletionReply(_DoneReply):
    """Reply to ``/v1/completions``."""

    prefix = "cmpl"

    def __init__(self, job: Job, *, reply_id: str, model: str, created: int) -> None:
        super().__init__(job)
        self._head = {"id": reply_id, "object": "text_completion", "created": created, "model": model}

    def opening(self) -> Iterator[bytes]:
        """Yields nothing: the first token comes at once."""
        yield from ()

    def piece(self, step: Step, *, first: bool, usage: Mapping[str, Any] | None) -> bytes:
        """Returns the event of a step; ``first`` of its choice."""
        job = self._job
        choice = {
            "index": step.choice,
            "text": (job.echo if first else "") + step.text,
            "logprobs": self._logprobs(_tokens(step)),
            "finish_reason": step.finish_reason,
            "stop_reason": step.stop_reason,
            "prompt_token_ids": job.prompts[step.prompt] if first and job.return_token_ids else None,
            "token_ids": _tokens(step) if job.return_token_ids else None,
        }
        return _event({**self._head, "choices": [choice], **({"usage": usage} if usage else {})})

    def ending(self, usage: Mapping[str, Any]) -> bytes:
        """Returns the event with the usage."""
        return _event({**self._head, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})

    def whole(self, progress: Progress) -> dict[str, Any]:
        """Returns the document of a reply that is not streamed."""
        return {
            **self._head,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(progress.choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**progress.usage(), "completion_tokens_details": None},
            "kv_transfer_params": progress.kv_transfer_params,
        }

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        job = self._job
        return {
            "index": index,
            "text": job.echo + choice.text,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": None,
            "prompt_token_ids": job.prompts[index // job.choices] if job.return_token_ids else None,
            "token_ids": choice.tokens if job.return_token_ids else None,
        }

    def _logprobs(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        if self._job.logprobs is None:
            return None
        texts = [decode(token) for token in tokens]
        offsets = [sum(map(len, texts[:index])) for index in range(len(texts))]
        top = [dict(_alternatives(token, self._job.logprobs + 1)) for token in tokens]
        return {
            "text_offset": offsets,
            "token_logprobs": [_LOGPROB] * len(tokens),
            "tokens": texts,
            "top_logprobs": top,
        }


def named_event(document: Mapping[str, Any]) -> bytes:
    """Returns an event that is named after its type."""
    return b"event: " + str(document["type"]).encode() + b"\n" + _event(document)


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(document) + b"\n\n"


def _tokens(step: Step) -> list[int]:
    return [] if step.token is None else [step.token]


def _chat_logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _alternatives(token: int, count: int) -> Iterator[tuple[str, float]]:
    for rank in range(count):
        yield decode(token + rank), _LOGPROB - rank
