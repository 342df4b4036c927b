"""How a turn finds the block set of the turn before it: scope, lookup keys.

Keys only say where to look. What is found is verified token by token inside the prefill engine, so a key that is too
coarse costs a lookup, and one that is too fine costs a reuse; neither costs a wrong answer.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backhaul_router.core import messages, responses, transcript
from backhaul_router.core.body import Endpoint, TurnBody
from backhaul_router.core.candidates import Pointer
from backhaul_router.core.errors import invalid
from backhaul_router.core.transcript import Transcript

MAX_KEYS = 16
"""Keys of one lookup."""

MAX_BEGINNINGS = 24
"""Beginnings of a prompt that are told apart: a turn shares nearly all of it with one that came shortly before."""

MAX_SESSION_ID_BYTES = 512
"""Longest session id; it is hashed and never stored or logged, this only bounds the work."""

_DIGEST_SIZE = 16

_TRANSCRIPTS: dict[Endpoint, Callable[[Mapping[str, Any]], Transcript]] = {
    Endpoint.CHAT: transcript.chat,
    Endpoint.RESPONSES: responses.transcript,
    Endpoint.MESSAGES: messages.transcript,
}
"""Completions have none."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A beginning of a prompt, up to the end of one of its messages."""

    digest: str
    byte_count: int
    """Its text, about."""


@dataclass(frozen=True, slots=True)
class TurnKeys:
    """Lookup keys of one turn."""

    find: tuple[str, ...]
    """Where the turn before may be, best first."""
    label: tuple[str, ...]
    """How the next turn will find this one."""
    continues: bool
    """Whether the body shows that a turn came before."""
    beginnings: tuple[Beginning, ...] = ()
    """Beginnings that other turns may share, longest first; the first is all of the prompt."""
    answered: tuple[tuple[str, int], ...] = ()
    """For keys in ``find``: how much of the prompt, in bytes, comes after the answer of the turn that they name."""
    previous: str = ""
    """The key of the response that the turn goes on from, where it names one: the rest of the prompt is not in it."""

    @property
    def byte_count(self) -> int:
        """Text of the prompt, about."""
        return self.beginnings[0].byte_count if self.beginnings else 0

    def new_byte_count(self, key: str) -> int:
        """Returns how much of the prompt is new to who holds what is found under a key; all of it when unknown."""
        return dict(self.answered).get(key, self.byte_count)

    def proves(self, key: str) -> bool:
        """Tells whether whoever is found under a key had the same messages; a session id says nothing about them."""
        return key == self.previous or any(beginning.digest == key for beginning in self.beginnings)

    def newest_of(self, pointers: Sequence[Pointer]) -> list[Pointer]:
        """Returns those under the best key under which any are that had the same messages: what one turn left."""
        for key in filter(self.proves, self.find):
            if under := [pointer for pointer in pointers if pointer.key == key]:
                return under
        return []

    @property
    def turns(self) -> tuple[str, ...]:
        """Those of ``find`` that are a single turn's own, its newest first."""
        if self.previous:
            return (self.previous,)
        return self.find[len(self.label) - 1 :] if self.label else ()

    @property
    def own(self) -> str:
        """The key that only a continuation of this turn has; empty without keys."""
        return self.label[-1] if self.label and not self.previous else ""


def scope_of(*, model: str, cache_salt: str, tenant: str) -> str:
    """Returns the scope (hex): nothing is ever found across two of them."""
    return _digest(b"scope", model.encode(), cache_salt.encode(), tenant.encode())


def checked_session_id(value: str | bytes | None) -> bytes | None:
    """Returns a client's session id as bytes, None for none.

    Raises ApiError (400) when it is too long. Any bytes are allowed: they are hashed at once.
    """
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    if raw and len(raw) > MAX_SESSION_ID_BYTES:
        raise invalid(f"the session id is longer than {MAX_SESSION_ID_BYTES} bytes", param="session_id")
    return raw or None


def keys_of(body: TurnBody, session_id: bytes | None) -> TurnKeys:
    """Returns the keys of a turn; without a session id, an earlier response and messages there are none."""
    session_id = session_id or _session_in(body)
    session = () if session_id is None else (session_key(session_id),)
    if body.previous_response_id:
        return _keys_after(body, session)
    if body.endpoint is Endpoint.COMPLETIONS:
        prompt = bytes(body.raw.get("prompt", b""))
        beginnings = (Beginning(_digest(b"prompt", prompt), len(prompt)),)
        return TurnKeys(session, session, continues=bool(session), beginnings=beginnings)
    conversation = _TRANSCRIPTS[body.endpoint](body.fields)
    chain = _chain(conversation)
    answers = conversation.answers[::-1]
    find = (*session, *(chain[index].digest for index in answers))[:MAX_KEYS]
    return TurnKeys(
        find,
        (*session, chain[-1].digest),
        continues=bool(answers),
        beginnings=tuple(chain[: -MAX_BEGINNINGS - 1 : -1]),
        answered=_answered(session, chain, answers),
    )


def _keys_after(body: TurnBody, session: tuple[str, ...]) -> TurnKeys:
    """Returns the keys of a turn that names the response before it, and holds only what is new."""
    previous = response_key(body.previous_response_id)
    new_bytes = len(body.raw["input"])
    return TurnKeys((previous,), session, continues=True, answered=((previous, new_bytes),), previous=previous)


def _answered(
    session: Sequence[str], chain: Sequence[Beginning], answers: Sequence[int]
) -> tuple[tuple[str, int], ...]:
    """A session's turn before is taken to be the one that the last assistant message answers."""
    named = [*((key, index) for key in session for index in answers[:1])]
    named += [(chain[index].digest, index) for index in answers[:MAX_KEYS]]
    return tuple((key, chain[-1].byte_count - chain[index + 1].byte_count) for key, index in named)


def session_key(session_id: bytes) -> str:
    """Returns the key under which every turn of a session is found."""
    return _digest(b"session", session_id)


def response_key(response_id: str) -> str:
    """Returns the key under which the turn that gave a response is found."""
    return _digest(b"response", response_id.encode("utf-8", "surrogatepass"))


def _session_in(body: TurnBody) -> bytes | None:
    named = (body.fields.get(name) for name in ("conversation_id", "session_id"))
    given = (checked_session_id(value) for value in named if isinstance(value, str))
    return next((session_id for session_id in given if session_id), None)


def _chain(conversation: Transcript) -> list[Beginning]:
    """Returns the prefixes of the messages, from the empty one to all of them."""
    seed = _canonical(conversation.seed)
    state = hashlib.blake2b(digest_size=_DIGEST_SIZE, person=b"backhaul-chain-1")
    _mix(state, seed)
    byte_count = len(seed)
    chain = [Beginning(state.hexdigest(), byte_count)]
    for message in conversation.messages:
        text = _canonical(message)
        _mix(state, text)
        byte_count += len(text)
        chain.append(Beginning(state.hexdigest(), byte_count))
    return chain


def _canonical(value: Mapping[str, Any]) -> bytes:
    """Returns JSON with sorted keys and without nulls at the top: client libraries reorder and add them at will."""
    return msgspec.json.encode({key: item for key, item in value.items() if item is not None}, order="deterministic")


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=_DIGEST_SIZE, person=b"backhaul-lookup1")
    for part in parts:
        _mix(state, part)
    return state.hexdigest()


def _mix(state: "hashlib.blake2b", part: bytes) -> None:
    state.update(len(part).to_bytes(8, "big"))
    state.update(part)
