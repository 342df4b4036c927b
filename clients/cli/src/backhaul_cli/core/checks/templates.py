"""Whether a chat template keeps what was said: tokens that it drops or changes cannot be reused."""

from collections.abc import Iterator, Sequence

from backhaul_cli.core.finding import Finding, note, warning
from backhaul_cli.core.snapshot import Snapshot, TemplateProbe

TOLERATED = 8
"""Tokens at an end that may differ: the seam between an answer and the template around it is tokenized anew."""


def templates(snapshot: Snapshot) -> Iterator[Finding]:
    """Finds models whose next prompt does not begin with what the turn before left."""
    for problem in snapshot.template_problems:
        yield note(
            "template-not-tried",
            "chat template",
            f"No chat template could be tried: {problem}.",
            "Give a --router that serves the model, and with tenants a key with --key-file.",
        )
    for probe in snapshot.templates:
        if (kept := common(probe.held, probe.following)) < len(probe.held) - TOLERATED:
            yield _drops(probe, kept)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens two prompts have in common from the start."""
    return next(
        (index for index, (mine, yours) in enumerate(zip(one, other, strict=False)) if mine != yours),
        min(len(one), len(other)),
    )


def _drops(probe: TemplateProbe, kept: int) -> Finding:
    lost = len(probe.held) - kept
    return warning(
        "template-drops-history",
        f"model {probe.model}",
        f"After {probe.kind}, the next prompt agrees with only {kept} of the {len(probe.held)} tokens that the decode "
        f"engine holds: {lost} tokens cannot be reused, nor anything after them. {_why(probe, kept)}",
        _fix(probe, kept),
    )


def _why(probe: TemplateProbe, kept: int) -> str:
    where = f'Held goes on with "{probe.held_text}", the next prompt with "{probe.following_text}".'
    if _begins_anew(probe, kept):
        return f"The template writes the beginning of the conversation anew, or leaves it out. {where}"
    if probe.kind == "an answer with reasoning":
        return f"The template drops what the answer thought (between <think> and </think>) once it is history. {where}"
    return f"The template changes an answer once it is history. {where}"


def _begins_anew(probe: TemplateProbe, kept: int) -> bool:
    """Some templates end a prompt with the tag that begins the answer's reasoning: that is the answer's already."""
    return kept < probe.prompt_count - TOLERATED


def _fix(probe: TemplateProbe, kept: int) -> str:
    if _begins_anew(probe, kept):
        return (
            "Use a template that only appends (--chat-template): no dates, counters or tool lists that change in front "
            "of the conversation, and no window over its last messages."
        )
    return (
        "Where the model allows it, keep reasoning in the history (--chat-template with a copy that does not strip it, "
        "or its own switch in --default-chat-template-kwargs) and have clients send it back; else expect answers with "
        "reasoning to be computed anew, while all before them is still reused."
    )
