"""``/v1/responses`` as vLLM 0.32 serves it (``entrypoints/openai/responses``), for texts: no tool is ever called."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backhaul_simulator.answers import Step
from backhaul_simulator.openai_bodies import Chat, parse
from backhaul_simulator.openai_checks import Served
from backhaul_simulator.openai_errors import RefusedError, not_valid
from backhaul_simulator.openai_replies import Progress, named_event
from backhaul_simulator.openai_requests import Job, chat_job
from backhaul_simulator.tokens import text_of_parts

Messages = list[dict[str, Any]]


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are looked at."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    request_id: str = ""
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    cache_salt: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    session_id: str | None = None


@dataclass(slots=True)
class Kept:
    """A response that is kept, and what was said up to it."""

    messages: Messages
    document: dict[str, Any]


@dataclass(slots=True)
class ResponseStore:
    """Responses by name. Like vLLM's it forgets none; without ``enabled`` it keeps none."""

    enabled: bool
    kept: dict[str, Kept] = field(default_factory=dict)

    def document(self, name: str) -> dict[str, Any]:
        """Returns a response. Raises RefusedError (404)."""
        return self._of(name).document

    def before(self, body: ResponseBody) -> Messages:
        """Returns what was said before a request. Raises RefusedError (404)."""
        if body.previous_response_id is None:
            return []
        kept = self._of(body.previous_response_id)
        answer = {"role": "assistant", "content": kept.document["output"][0]["content"][0]["text"]}
        # Instructions do not carry over (`responses/utils.py`, ``construct_input_messages``).
        return [*(message for message in kept.messages if message["role"] != "system"), answer]

    def _of(self, name: str) -> Kept:
        if name not in self.kept:
            message = f"Response with id '{name}' not found."
            raise RefusedError(message, status=404, kind="invalid_request_error", param="response_id")
        return self.kept[name]


def parse_response(raw: bytes, served: Served, store: ResponseStore) -> tuple[Job, "ResponseReply"]:
    """Reads a body. Raises RefusedError with what vLLM answers to a bad one."""
    body = parse(raw, ResponseBody)
    if body.background and not store.enabled:
        raise RefusedError("This vLLM engine does not support `store=True`", param="background")
    if body.background:
        raise not_valid("the simulator answers nothing in the background", "background")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*instructions, *store.before(body), *_messages(body.input)]
    job = chat_job(
        Chat(
            model=body.model,
            messages=messages,
            max_tokens=body.max_output_tokens,
            stream=body.stream,
            temperature=body.temperature,
            top_p=body.top_p,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            tools=body.tools or None,
            chat_template_kwargs=body.chat_template_kwargs,
            reasoning_effort=(body.reasoning or {}).get("effort"),
            cache_salt=body.cache_salt,
            kv_transfer_params=body.kv_transfer_params,
            session_id=body.session_id,
        ),
        served,
    )
    return job, ResponseReply(body, job, served.model, messages, store)


def _messages(given: str | list[dict[str, Any]]) -> Messages:
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [*map(_message, items)]


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if item.get("type") == "reasoning":
        return {"role": "assistant", "reasoning": text_of_parts(item.get("content") or [])}
    content = item.get("content")
    return {"role": item.get("role"), "content": text_of_parts(content) if isinstance(content, list) else content}


class ResponseReply:
    """Reply to ``/v1/responses``."""

    def __init__(self, body: ResponseBody, job: Job, model: str, messages: Messages, store: ResponseStore) -> None:
        self.name = body.request_id or f"resp_{uuid.uuid4().hex}"
        self._body = body
        self._job = job
        self._model = model
        self._messages = messages
        self._store = store
        self._created = int(time.time())
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._count = 0
        self._open = False

    def accepted(self) -> Iterator[bytes]:
        """Yields the events that come before anything is computed."""
        begun = self._document("in_progress", [], None, None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def opening(self) -> Iterator[bytes]:
        """Yields nothing: an item begins with its first text."""
        yield from ()

    def piece(self, step: Step, *, first: bool, usage: Mapping[str, Any] | None) -> bytes:
        """Returns the events of a step."""
        if not step.text:
            return b""
        events = [] if self._open else [*self._opened()]
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return b"".join([*events, self._event("response.output_text.delta", **place, delta=step.text, logprobs=[])])

    def closing(self, progress: Progress) -> Iterator[bytes]:
        """Yields the events after the last token."""
        text = progress.choices[0].text
        if self._open:
            place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
            yield self._event("response.output_text.done", **place, text=text, logprobs=[])
            yield self._event("response.content_part.done", **place, part=_part(text))
            yield self._event("response.output_item.done", output_index=0, item=self._item(text))
        yield self._event("response.completed", response=self.whole(progress))

    def failed(self, document: Mapping[str, Any]) -> Iterator[bytes]:
        """vLLM makes no event of an error: its server breaks the stream off. Raises ConnectionResetError."""
        raise ConnectionResetError(str(document))
        yield b""

    def whole(self, progress: Progress) -> dict[str, Any]:
        """Returns the document of a reply, and keeps it if it is to be kept."""
        choice, usage = progress.choices[0], progress.usage()
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        document = self._document(status, [self._item(choice.text)], _usage(usage), progress.kv_transfer_params)
        if self._body.store and self._store.enabled:
            self._store.kept[self.name] = Kept(self._messages, document)
        return document

    def _opened(self) -> Iterator[bytes]:
        self._open = True
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        begun = {**self._item(""), "content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=0, item=begun)
        yield self._event("response.content_part.added", **place, part=_part(""))

    def _document(
        self, status: str, output: Sequence[Any], usage: Mapping[str, Any] | None, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        body = self._body
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.name,
            "created_at": self._created,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": "auto" if body.tools else "none",
            "tools": body.tools,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": False,
            "max_output_tokens": self._job.max_tokens[0],
            "previous_response_id": body.previous_response_id,
            "service_tier": "auto",
            "status": status,
            "truncation": "disabled",
            "usage": usage,
            "kv_transfer_params": params,
        }

    def _item(self, text: str) -> dict[str, Any]:
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": "completed"}
        return {**item, "content": [_part(text)]}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._count += 1
        return named_event({**fields, "sequence_number": self._count - 1, "type": kind})


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
