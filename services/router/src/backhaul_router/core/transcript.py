"""The conversation in a request's body, in the form in which prompts are told apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said before this turn, and in it."""

    seed: Mapping[str, Any]
    """What else changes how the same messages become tokens."""
    messages: Sequence[Mapping[str, Any]]
    answers: Sequence[int]
    """Where answers of the model begin, oldest first; never at the very beginning."""


_SEED_FIELDS = (
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_special_tokens",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
"""`tool_choice` is not among them: agents change it from turn to turn, and hardly any template shows it to models."""


def chat(fields: Mapping[str, Any]) -> Transcript:
    """Returns that of a chat."""
    messages = fields["messages"]
    seed = present(fields, _SEED_FIELDS)
    seed["add_generation_prompt"] = fields.get("add_generation_prompt", True)
    return Transcript(seed, messages, [i for i, message in enumerate(messages) if i and message["role"] == "assistant"])


def present(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of these names that are there, nulls left out."""
    return {name: fields[name] for name in names if fields.get(name) is not None}
