"""What trying a chat template brings to light, with templates as models have them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from backhaul_cli.core.checks.templates import common
from backhaul_cli.core.doctor import diagnose
from backhaul_cli.core.finding import Finding
from backhaul_cli.services import Services
from backhaul_cli.template_probes import MOST_MODELS, probe_templates
from tests.fakes.cluster_seen import cluster

Messages = Sequence[Mapping[str, str]]
Template = Callable[[Messages], str]

_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def whole(messages: Messages) -> str:
    return "".join(f"<{one['role']}> {one['content']} <end> " for one in messages) + "<assistant> "


def drops_reasoning(messages: Messages) -> str:
    return whole([{**one, "content": _THOUGHT.sub("", one["content"])} for one in messages])


def opens_reasoning(messages: Messages) -> str:
    """Writes the first tag itself, and keeps what was thought."""
    return whole(messages) + "<think>\n"


def opens_and_drops_reasoning(messages: Messages) -> str:
    return drops_reasoning(messages) + "<think>\n"


def last_message(messages: Messages) -> str:
    return whole(messages[-1:])


class Router:
    """Tokenizes by words."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._words: list[str] = []
        self.status = 200

    def http(self, path: str, body: Any = None) -> tuple[int, Any]:
        if self.status != 200:
            return self.status, {"error": {"message": "no such model"}}
        if path == "/detokenize":
            return 200, {"prompt": " ".join(self._words[token] for token in body["tokens"])}
        text = self._template(body["messages"]) if "messages" in body else body["prompt"]
        return 200, {"tokens": [self._token(word) for word in text.split()]}

    def _token(self, word: str) -> int:
        if word not in self._words:
            self._words.append(word)
        return self._words.index(word)


def found(template: Template) -> list[Finding]:
    probes, problems = probe_templates(cast(Services, Router(template)), ["m"])
    assert [probe.kind for probe in probes][-1] == "an answer with reasoning"
    return diagnose(cluster(templates=probes, template_problems=problems))


@pytest.mark.parametrize("template", [whole, opens_reasoning])
def test_a_template_that_appends_is_well(template: Template) -> None:
    assert found(template) == []


def test_a_template_that_drops_reasoning_is_told_with_the_words_at_which_prompts_part() -> None:
    (finding,) = found(drops_reasoning)
    assert "drops what the answer thought" in finding.what
    assert 'Held goes on with "<think> The user asks' in finding.what
    assert 'the next prompt with "It asks along the road' in finding.what


def test_a_template_that_opens_reasoning_itself_and_drops_it_is_not_taken_for_one_that_begins_anew() -> None:
    (finding,) = found(opens_and_drops_reasoning)
    assert "drops what the answer thought" in finding.what


def test_a_template_that_shows_the_last_message_alone_is_told_for_every_answer() -> None:
    findings = found(last_message)
    assert len(findings) == 2
    assert all("writes the beginning of the conversation anew" in finding.what for finding in findings)


def test_a_router_that_does_not_tokenize_is_a_problem_of_its_own() -> None:
    router = Router(whole)
    router.status = 404
    probes, problems = probe_templates(cast(Services, router), ["m"])
    assert (probes, problems) == ((), ("m: /tokenize answers 404: no such model",))


def test_only_so_many_models_are_tried() -> None:
    probes, _ = probe_templates(cast(Services, Router(whole)), [f"m{number}" for number in range(10)])
    assert len({probe.model for probe in probes}) == MOST_MODELS


@pytest.mark.parametrize(("one", "other", "count"), [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2), (1, 3), 1)])
def test_what_two_prompts_have_in_common(one: tuple[int, ...], other: tuple[int, ...], count: int) -> None:
    assert common(one, other) == common(other, one) == count
