"""What is read from a gateway's messages, and how a body goes back in pieces."""

import pytest
from google.protobuf import struct_pb2

from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul_router import ext_proc_messages as messages


def hinted(value: list[str] | str | float) -> pb.ProcessingRequest:
    hint = struct_pb2.Struct()
    hint.update({"x-gateway-destination-endpoint-subset": value})
    request = pb.ProcessingRequest()
    request.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    return request


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80, 10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        ([], set()),
        ("", set()),
        (7, set()),
    ],
    ids=["list", "text", "empty list", "empty text", "something else"],
)
def test_endpoints_that_a_gateway_names_are_all_that_may_be_picked(
    value: list[str] | str | float, named: set[str]
) -> None:
    assert messages.subset_in(hinted(value)) == frozenset(named)


def test_where_a_gateway_names_none_all_may_be_picked() -> None:
    assert messages.subset_in(pb.ProcessingRequest()) is None


def test_of_headers_of_one_name_the_first_counts_and_any_bytes_will_do() -> None:
    values = [pb.HeaderValue(key="A", raw_value=b"\xff"), pb.HeaderValue(key="a", value="second")]
    assert messages.headers_in(pb.HeaderMap(headers=values)) == {"a": "\udcff"}


@pytest.mark.parametrize(
    ("status", "told"), [("200", 200), ("", 502), ("20x", 502), ("0200", 502), ("000", 502), ("٢٠٠", 502)]
)
def test_an_answer_without_a_status_is_a_bad_one(status: str, told: int) -> None:
    assert messages.status_in({":status": status}) == told


@pytest.mark.parametrize("trailers", [False, True])
def test_a_long_body_goes_back_in_pieces_of_which_the_last_ends_it(trailers: bool) -> None:
    body = bytes(1_000_000)
    metadata = messages.destination("10.0.0.1:80", "d1")
    head, *pieces = messages.in_pieces(messages.mutation({}), body, metadata, trailers=trailers)

    assert head.dynamic_metadata == metadata
    last = pieces.pop() if trailers else pieces[-1]
    streamed = [piece.request_body.response.body_mutation.streamed_response for piece in pieces]
    assert b"".join(piece.body for piece in streamed) == body
    assert [piece.end_of_stream for piece in streamed] == [False] * (len(streamed) - 1) + [not trailers]
    assert last.HasField("request_trailers") is trailers


def test_the_destination_is_named_in_the_gateways_own_metadata_and_so_is_its_node() -> None:
    metadata = pb.Metadata()
    metadata.filter_metadata["envoy.lb"].CopyFrom(
        messages.destination("10.0.0.1:80", "d1").fields["envoy.lb"].struct_value
    )

    fields = metadata.filter_metadata["envoy.lb"].fields
    assert fields["x-gateway-destination-endpoint"].string_value == "10.0.0.1:80"
    assert (messages.node_in(metadata), messages.node_in(pb.Metadata())) == ("d1", "")
