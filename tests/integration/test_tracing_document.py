"""docs/tracing.md says what spans there are, and of each attribute on which it stands."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv import attributes as stable
from opentelemetry.semconv._incubating import attributes as incubating

from backhaul_common import attributes
from tests.fakes.engine import bare_500
from tests.fakes.eventually import eventually
from tests.fakes.router_stack import RouterStack, router_stack
from tests.integration.test_router_second_chances import chances, publish
from tests.integration.test_router_traces import tree, turn_in
from tests.integration.test_router_turns import label_key

DOCUMENT = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text()
OURS = "backhaul."
NOT_SEEN_HERE = ("etcd.", "llm_request")
"""Spans of others than a router and an agent that are faked."""


def rows() -> dict[str, str]:
    """Returns what the document has in front of each attribute."""
    found = re.findall(r"^\| (.+?) \| `([\w.]+)` \|", DOCUMENT, re.MULTILINE)
    assert len({name for _, name in found}) == len(found)
    return {name: spans for spans, name in found}


def picture() -> list[str]:
    """Returns the names of spans in the picture, from the top."""
    block = DOCUMENT.partition("```spans\n")[2].partition("```")[0]
    return [line.lstrip(" │├└─").split()[0] for line in block.splitlines()]


def flat(nested: Mapping[str, Any]) -> Iterator[str]:
    for name, below in nested.items():
        yield name
        yield from flat(below)


def constants() -> set[str]:
    return {value for name, value in vars(attributes).items() if name.isupper() and isinstance(value, str)}


def conventions(package: Any) -> dict[str, str]:
    """Returns the attributes of a package of conventions, each with what is said of it."""
    found: dict[str, str] = {}
    for module in Path(next(iter(package.__path__))).glob("*_attributes.py"):
        found |= dict(re.findall(r'^[A-Z_]+: Final = "([\w.]+)"\n(?:"""\n(.*?)\n)?', module.read_text(), re.MULTILINE))
    return found


def stands_on(spans: str, span: ReadableSpan) -> bool:
    """Tells whether a row's first column means a span."""
    if "gRPC calls" in spans and span.name.startswith("/backhaul."):
        return True
    if "`etcd.*`" in spans and span.name.startswith("etcd."):
        return True
    return f"`{span.name}`" in spans or ("all of the router's" in spans and not span.name.startswith("/"))


def undocumented(spans: Iterable[ReadableSpan]) -> set[tuple[str, str]]:
    known = rows()
    return {
        (span.name, name)
        for span in spans
        for name in span.attributes or {}
        if not stands_on(known.get(name, ""), span)
    }


def test_every_attribute_is_in_the_table_and_none_that_there_is_not() -> None:
    assert rows().keys() == constants()


@pytest.mark.parametrize("name", sorted(name for name in constants() if not name.startswith(OURS)))
def test_a_name_of_the_conventions_is_one_of_the_pinned_version_and_current(name: str) -> None:
    known = {**conventions(incubating), **conventions(stable)}
    assert name in known
    # gRPC's own instrumentation, whose spans ours are like, has the older ones.
    assert name.startswith("rpc.") or not re.match("Deprecated: (Replaced|Removed|Use )", known[name])


def test_old_names_would_be_noticed() -> None:
    known = conventions(incubating)
    assert all(known[name].startswith("Deprecated: R") for name in ("gen_ai.system", "gen_ai.usage.prompt_tokens"))


async def test_the_picture_shows_a_warm_turn(spans: InMemorySpanExporter) -> None:
    async with router_stack() as stack:
        await warm(stack)
    top, *below = [name for name in picture() if not name.startswith(NOT_SEEN_HERE)]
    assert (top, below) == ("turn", [*flat(tree(spans, turn_in(spans)))])


async def test_all_that_spans_say_is_in_the_table(spans: InMemorySpanExporter) -> None:
    async with router_stack() as stack:
        await warm(stack)
        stack.prefill.then(bare_500())
        await warm(stack)
        stack.decode.then(bare_500(), bare_500())
        assert (await stack.chat("hi")).status >= 500
        await stack.lose(stack.prefill)
        assert (await stack.chat("other", stream=True)).headers["x-backhaul-fallback"] == "decode"
    async with chances() as stack:
        publish(stack)
        assert (await stack.chat("hi", "hello", "more")).route == "warm"
    await eventually(lambda: len([span for span in spans.get_finished_spans() if span.name == "turn"]) == 5)
    seen = {name for span in spans.get_finished_spans() for name in span.attributes or {}}
    assert undocumented(spans.get_finished_spans()) == set()
    assert {name for name, where in rows().items() if "`turn`" in where} <= seen
    assert {event.name for span in spans.get_finished_spans() for event in span.events} == {"pair set apart"}


async def warm(stack: RouterStack) -> None:
    set_id = f"set-{len(stack.owner.claims)}"
    stack.directory.pointers.clear()
    stack.hold(set_id)
    stack.publish(label_key("hi"), set_id)
    assert (await stack.chat("hi", "hello", "more", stream=True)).status == 200
