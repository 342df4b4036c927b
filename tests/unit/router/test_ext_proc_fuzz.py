"""Whatever a gateway sends, in whatever order: its picker answers or ends the stream, and leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul_router import ext_proc_messages as messages
from backhaul_router.core import gateway
from backhaul_router.core.errors import ApiError
from backhaul_router.ext_proc_service import Context, ExternalProcessor
from tests.unit.router.bodies import chat
from tests.unit.router.ports import Bench
from tests.unit.router.test_admission import admission
from tests.unit.router.test_nodes import node

P, D = (node(name, engine_url=f"http://10.0.0.{index}:80") for index, name in enumerate(("p1", "d1")))
REQUEST = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
STREAM = {":status": "200", "content-type": "text/event-stream"}
BODY = msgspec.json.encode(chat("a", model="m", stream=True).fields)
NAMES = (*REQUEST, *STREAM, "content-length", "content-encoding", "x-session-id")
VALUES = (*REQUEST.values(), *STREAM.values(), "503", "7", "0")
MODES = (pb.BUFFERED, pb.FULL_DUPLEX_STREAMED, pb.NONE, pb.STREAMED, 99)


def map_of(headers: dict[str, str]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])


def struct_of(fields: dict[str, Any]) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    struct.update(fields)
    return struct


maps = st.sampled_from([map_of(REQUEST), map_of(STREAM)]) | st.builds(
    pb.HeaderMap,
    headers=st.lists(
        st.builds(
            pb.HeaderValue,
            key=st.sampled_from(NAMES) | st.text(),
            raw_value=st.sampled_from(VALUES).map(str.encode) | st.binary(),
        )
    ),
)
ends = st.booleans()
bodies = st.builds(pb.HttpBody, body=st.sampled_from([BODY, b"{", b"{}"]) | st.binary(), end_of_stream=ends)
steps = st.one_of(
    st.just(pb.ProcessingRequest()),
    st.builds(pb.ProcessingRequest, request_headers=st.builds(pb.HttpHeaders, headers=maps, end_of_stream=ends)),
    st.builds(pb.ProcessingRequest, response_headers=st.builds(pb.HttpHeaders, headers=maps, end_of_stream=ends)),
    st.builds(pb.ProcessingRequest, request_body=bodies),
    st.builds(pb.ProcessingRequest, response_body=bodies),
    st.builds(pb.ProcessingRequest, request_trailers=st.just(pb.HttpTrailers())),
    st.builds(pb.ProcessingRequest, response_trailers=st.just(pb.HttpTrailers())),
)
modes = st.just(pb.ProtocolConfiguration(request_body_mode=pb.BUFFERED)) | st.builds(
    pb.ProtocolConfiguration, request_body_mode=st.sampled_from(MODES), response_body_mode=st.sampled_from(MODES)
)
firsts = st.builds(
    pb.ProcessingRequest, request_headers=st.just(pb.HttpHeaders(headers=map_of(REQUEST))), protocol_config=modes
)
asked = st.just(pb.ProcessingRequest(request_body=pb.HttpBody(body=BODY, end_of_stream=True)))
answered = st.just(pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=map_of(STREAM))))
scripts = st.lists(steps, max_size=5) | st.tuples(firsts, asked | steps, answered | steps, steps, steps).map(list)
said = st.dictionaries(
    st.sampled_from([gateway.SUBSET, gateway.SERVED, "response.code_details"]),
    st.recursive(
        st.sampled_from(["10.0.0.1:80", "via_upstream", "timeout"]) | st.none() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=2,
).map(struct_of)


async def answers_to(script: Sequence[pb.ProcessingRequest]) -> list[pb.ProcessingResponse]:
    """Plays a gateway's part to its end, and checks that nothing is left running."""
    bench, limits, answers = Bench(nodes=[P, D]), admission(max_held_bytes=100_000), list[pb.ProcessingResponse]()

    class Stream:
        async def write(self, answer: pb.ProcessingResponse) -> None:
            answers.append(answer)

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ()

    async def requests() -> AsyncIterator[pb.ProcessingRequest]:
        for message in script:
            yield message
            await asyncio.sleep(0)

    picker = ExternalProcessor(turns=bench.turns, admission=limits, body_limit_bytes=10_000, receive_s=10.0)
    await picker.Process(requests(), cast("Context", Stream()))
    assert (limits.turn_count, limits.held_bytes, bench.live.load.total) == (0, 0, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return answers


@settings(max_examples=150)
@given(scripts, said)
def test_any_messages_in_any_order_are_answered_and_leave_nothing(
    script: list[pb.ProcessingRequest], metadata: struct_pb2.Struct
) -> None:
    for message in script:
        for namespace in ("envoy.lb", "envoy.lb.subset_hint"):
            message.metadata_context.filter_metadata[namespace].CopyFrom(metadata)
        message.attributes["envoy.filters.http.ext_proc"].CopyFrom(metadata)
    answers = asyncio.run(answers_to(script))

    picked = [messages.expectation_of(metadata_of(answer)) for answer in answers if answer.HasField("dynamic_metadata")]
    assert {one and one.node_id for one in picked} <= {D.node_id}
    refusals = [index for index, answer in enumerate(answers) if answer.HasField("immediate_response")]
    assert refusals in ([], [len(answers) - 1]), "nothing follows a refusal"


def metadata_of(answer: pb.ProcessingResponse) -> pb.Metadata:
    metadata = pb.Metadata()
    for namespace, value in answer.dynamic_metadata.fields.items():
        metadata.filter_metadata[namespace].CopyFrom(value.struct_value)
    return metadata


@example(pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=map_of(REQUEST))).SerializeToString())
@given(st.binary())
def test_any_bytes_are_a_message_that_can_be_read_or_none(data: bytes) -> None:
    try:
        request = pb.ProcessingRequest.FromString(data)
    except DecodeError:
        return
    headers = messages.headers_in(request.request_headers)
    assert 100 <= messages.status_in(headers) <= 999
    assert isinstance(messages.served_in(request), str)
    assert isinstance(messages.details_in(request), str)
    messages.subset_in(request)
    messages.expectation_of(request.metadata_context)
    with suppress(ApiError):
        gateway.endpoint_of(headers, body_limit=10)
