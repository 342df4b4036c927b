"""Names that clients give to images and the like."""

from typing import Any

import pytest

from backhaul_router.core.errors import ApiError
from backhaul_router.core.media import check_media

IMAGE = {"type": "image_url", "image_url": None, "uuid": "somebodys"}
TEXT = {"type": "text", "text": "see"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]}, "messages"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
        ({"input": [IMAGE]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": [IMAGE]}]}, "input"),
        ({"input": [{"type": "computer_call_output", "call_id": "1", "output": IMAGE}]}, "input"),
        ({"system": [IMAGE]}, "system"),
        ({"items": [{"content": [IMAGE]}]}, "items"),
        ({"query": "see", "documents": {"content": [IMAGE]}}, "documents"),
        ({"data_1": {"content": [IMAGE]}, "data_2": "see"}, "data_1"),
    ],
)
def test_none_may_be_given_wherever_engines_would_take_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match="uuid") as caught:
        check_media(fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [TEXT, {**IMAGE, "uuid": None}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"uuid": "an argument"}}]}]},
        {"input": "uuid", "user": {"uuid": "me"}},
        {},
    ],
)
def test_other_things_may_have_that_name(fields: dict[str, Any]) -> None:
    check_media(fields)
