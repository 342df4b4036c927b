"""Tries chat templates, by the router's `/tokenize`: what a turn leaves, and what the next one's prompt is.

Nothing is computed: an answer is made up, once as models give it and once with reasoning in front.
"""

from collections.abc import Sequence
from typing import Any

from backhaul_cli.core.checks.templates import common
from backhaul_cli.core.snapshot import TemplateProbe
from backhaul_cli.services import Services
from backhaul_common.errors import BackhaulError, InternalError

MOST_MODELS = 4
_ASKED = {"role": "user", "content": "How does a lorry find a load for its way back? " * 8}
_ANSWER = "It asks along the road, and takes what lies on its way. " * 8
_REASONING = "The user asks about lorries, so the return trip matters here. " * 12
_SHOWN_TOKENS = 12
"""Tokens that are shown where two prompts part."""


def probe_templates(services: Services, models: Sequence[str]) -> tuple[tuple[TemplateProbe, ...], tuple[str, ...]]:
    """Tries the templates of some models; returns what came of it, and why some could not be tried."""
    probes: list[TemplateProbe] = []
    problems: list[str] = []
    for model in models[:MOST_MODELS]:
        try:
            probes += _probes(services, model)
        except BackhaulError as error:
            problems.append(f"{model}: {error.message}")
    return tuple(probes), tuple(problems)


def _probes(services: Services, model: str) -> list[TemplateProbe]:
    prompt = _chat(services, model, [_ASKED])
    thought = f"<think>\n{_REASONING}\n</think>\n\n{_ANSWER}"
    # Some templates write the first tag themselves, as the end of the prompt: then every answer begins with reasoning.
    if "<think>" in _words(services, model, prompt[-_SHOWN_TOKENS:]):
        written = thought.removeprefix("<think>\n")
        return [_probe(services, model, prompt, "an answer with reasoning", written=written, said=thought)]
    return [
        _probe(services, model, prompt, "a plain answer", written=_ANSWER, said=_ANSWER),
        _probe(services, model, prompt, "an answer with reasoning", written=thought, said=thought),
    ]


def _probe(
    services: Services, model: str, prompt: tuple[int, ...], kind: str, *, written: str, said: str
) -> TemplateProbe:
    """``written`` is what the model generates, ``said`` what a client sends back as history."""
    held = (*prompt, *_text(services, model, written))
    history = [_ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    following = _chat(services, model, history)
    kept = common(held, following)
    return TemplateProbe(
        model=model,
        kind=kind,
        held=held,
        prompt_count=len(prompt),
        following=following,
        held_text=_words(services, model, held[kept : kept + _SHOWN_TOKENS]),
        following_text=_words(services, model, following[kept : kept + _SHOWN_TOKENS]),
    )


def _chat(services: Services, model: str, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    return _tokens(services, {"model": model, "messages": messages, "add_generation_prompt": True})


def _text(services: Services, model: str, text: str) -> tuple[int, ...]:
    return _tokens(services, {"model": model, "prompt": text, "add_special_tokens": False})


def _tokens(services: Services, body: dict[str, Any]) -> tuple[int, ...]:
    document = _asked(services, "/tokenize", body)
    tokens = document.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise InternalError("TOKENS", "/tokenize names no tokens")
    return tuple(tokens)


def _words(services: Services, model: str, tokens: Sequence[int]) -> str:
    if not tokens:
        return ""
    document = _asked(services, "/detokenize", {"model": model, "tokens": list(tokens)})
    return " ".join(str(document.get("prompt", "")).split())


def _asked(services: Services, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, document = services.http(path, body)
    if status != 200 or not isinstance(document, dict):
        told = document.get("error", {}) if isinstance(document, dict) else {}
        why = told.get("message", "") if isinstance(told, dict) else ""
        raise InternalError("TOKENIZE", f"{path} answers {status}{f': {why}' if why else ''}")
    return document
