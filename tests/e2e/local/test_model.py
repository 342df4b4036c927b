"""The demo model's tokenizer: what the model says is, as history, the very tokens that it generated."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

RENDER = """
import json, random, sys
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
answers = []
for case in json.loads(sys.stdin.read()):
    text = tokenizer.apply_chat_template(case.pop("messages"), tokenize=False, **case)
    answers.append({"text": text, "ids": tokenizer(text)["input_ids"]})
print(json.dumps(answers))
"""

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "Compare 12 zebras, naïve cafés and 你好."}
THOUGHT = {"role": "assistant", "content": "<think>\nlong thoughts\n</think>\n\n the answer."}
TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "which tool",
    "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
}
TOOL_REPLY = {"role": "tool", "content": "noon"}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def render(python: Path, model: Path, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python, "-c", RENDER, model], input=json.dumps(cases), check=True, capture_output=True, text=True
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_history_is_a_prefix_of_the_next_turn_and_earlier_reasoning_is_dropped(
    engine_python: Path, tiny_model: Path
) -> None:
    first = {"messages": [SYSTEM, USER], "add_generation_prompt": True}
    second = {
        "messages": [SYSTEM, USER, {"role": "assistant", "content": " the road."}, USER],
        "add_generation_prompt": True,
    }
    reasoned = {"messages": [SYSTEM, USER, THOUGHT, USER]}
    latest = {"messages": [SYSTEM, USER, TOOL_CALL, TOOL_REPLY], "tools": [TOOL]}
    older = {"messages": [SYSTEM, USER, TOOL_CALL, TOOL_REPLY, THOUGHT, USER], "tools": [TOOL]}

    one, two, dropped, kept, gone = render(engine_python, tiny_model, first, second, reasoned, latest, older)

    assert two["ids"][: len(one["ids"])] == one["ids"]
    assert "long thoughts" not in dropped["text"]
    assert "<|im_start|>assistant\n the answer.<|im_end|>" in dropped["text"]
    assert "<think>\nwhich tool\n</think>" in kept["text"]
    assert '"name": "clock"' in kept["text"]
    assert "<tool_response>\nnoon\n</tool_response>" in kept["text"]
    assert "which tool" not in gone["text"]
