"""Misbehaviour on request: a script of what the next requests meet."""

import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
After = Annotated[int, msgspec.Meta(ge=0)] | Literal["end"]
"""Events of a stream after which something happens. 0: before the engine is asked; "end": after the last byte. For a
reply that is not streamed anything but 0 means: when the engine has answered, in place of the reply."""


class _Matching(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="fault"):
    """Which requests are meant; all by default."""

    times: _Count = 1
    """Requests that it happens to."""
    share: _Share = 1.0
    """Of the requests that are meant: each is drawn, in every process alike."""
    path: str | None = None
    """`/v1/chat/completions`, `/v1/completions` or `/tokenize`."""
    stream: bool | None = None
    warm: bool | None = None
    """Whether the request brings blocks to read (`remote_block_ids`) and hands on what it computes."""

    def meets(self, path: str, body: Mapping[str, Any]) -> bool:
        """Tells whether a request is meant."""
        params = body.get("kv_transfer_params")
        params = params if isinstance(params, dict) else {}
        warm = bool(params.get("remote_block_ids")) and bool(params.get("do_remote_decode"))
        return (
            self.path in (None, path) and self.stream in (None, bool(body.get("stream"))) and self.warm in (None, warm)
        )


class Hang(_Matching, kw_only=True, tag="hang"):
    """Never answers."""


class Bare500(_Matching, kw_only=True, tag="bare_500"):
    """Answers 500 without a reason, as after blocks that could not be loaded."""


class Refuse(_Matching, kw_only=True, tag="refuse"):
    """Answers with an error."""

    status: Annotated[int, msgspec.Meta(ge=400, le=599)]
    message: str = "refused on request"


class FinishError(_Matching, kw_only=True, tag="finish_error"):
    """Answers 200 with the finish reason "error" and nothing else; the engine is not asked."""


class NoParams(_Matching, kw_only=True, tag="no_params"):
    """Answers without kv_transfer_params."""


class Reset(_Matching, kw_only=True, tag="reset"):
    """Resets the connection."""

    after: After = 0


class Die(_Matching, kw_only=True, tag="die"):
    """The process kills itself with SIGKILL."""

    after: After = 0


class Delay(_Matching, kw_only=True, tag="delay"):
    """Asks the engine late."""

    seconds: _Seconds


class SlowReads(_Matching, kw_only=True, tag="slow_reads"):
    """Reads another engine's blocks slowly."""

    seconds_per_block: _Seconds


Fault = Hang | Bare500 | Refuse | FinishError | NoParams | Reset | Die | Delay | SlowReads


class _Script(msgspec.Struct, forbid_unknown_fields=True):
    next: list[Fault]


class Faults:
    """What is still to happen, in order."""

    def __init__(self) -> None:
        self._next: list[Fault] = []
        self._rng = random.Random(0)

    def add(self, document: bytes) -> None:
        """Adds `{"next": [{"fault": ...}, ...]}`. Raises ValueError that says what is wrong with it."""
        try:
            self._next += msgspec.json.decode(document, type=_Script).next
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from error

    def clear(self) -> None:
        """Forgets all."""
        self._next.clear()

    def left(self) -> dict[str, Any]:
        """Returns what is still to happen, for JSON."""
        return {"next": msgspec.to_builtins(self._next)}

    def take(self, path: str, raw: bytes) -> Fault | None:
        """Returns what happens to a request: the first entry that means it, once less from now on."""
        if not self._next:
            return None
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            body = {}
        for index, fault in enumerate(self._next):
            if fault.meets(path, body) and self._drawn(fault):
                fault.times -= 1
                if not fault.times:
                    del self._next[index]
                return fault
        return None

    def _drawn(self, fault: Fault) -> bool:
        return fault.share == 1.0 or self._rng.random() < fault.share
