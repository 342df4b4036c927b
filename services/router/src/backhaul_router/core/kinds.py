"""Which requests the decode engine must serve alone, without a hand-off."""

from typing import Any

from backhaul_router.core.body import TurnBody


def decode_alone(body: TurnBody) -> str:
    """Returns the field that makes two legs impossible, empty when none does.

    A hand-off serves one sequence (``n``, ``best_of``, beams, lists of prompts: vllm-project/vllm#50559), and a decode
    engine that was handed blocks has no logits of the prompt (``prompt_logprobs``, ``echo``: vllm-project/vllm#50792).
    """
    fields = body.fields
    for name in ("n", "best_of"):
        if (fields.get(name) or 1) > 1:
            return name
    for name in ("use_beam_search", "echo", "prompt_embeds"):
        if fields.get(name):
            return name
    if fields.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if (fields.get("truncate_prompt_tokens") or 0) < 0:
        # Truncates to what max_tokens leaves, which differs between the legs.
        return "truncate_prompt_tokens"
    return "prompt" if _many(fields.get("prompt")) else ""


def _many(prompt: Any) -> bool:
    """Tells whether a prompt is a list of prompts; a list of token ids is one prompt."""
    return isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
