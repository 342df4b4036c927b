"""What is read from a gateway's messages, and how a body goes back in pieces."""

import pytest
from google.protobuf import struct_pb2

from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul_router import ext_proc_messages as messages
from backhaul_router.core.expectation import Expectation

EXPECTED = Expectation(
    node_id="d1",
    engine_id="e1",
    endpoint="10.0.0.1:80",
    route="cold",
    stream=True,
    handed_off=True,
    token_count=5,
    share=1.0,
    before_s=0.25,
    estimate_s=None,
)


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
    assert messages.headers_in(pb.HttpHeaders(headers=pb.HeaderMap(headers=values))) == {"a": "\udcff"}


@pytest.mark.parametrize(
    ("status", "told"), [("200", 200), ("", 502), ("20x", 502), ("0200", 502), ("000", 502), ("٢٠٠", 502)]
)
def test_an_answer_without_a_status_is_a_bad_one(status: str, told: int) -> None:
    assert messages.status_in({":status": status}) == told


@pytest.mark.parametrize("trailers", [False, True])
def test_a_long_body_goes_back_in_pieces_of_which_the_last_ends_it(trailers: bool) -> None:
    body = bytes(1_000_000)
    metadata = messages.destination("10.0.0.1:80", EXPECTED)
    head, *pieces = messages.in_pieces(messages.mutation({}), body, metadata, trailers=trailers)

    assert head.dynamic_metadata == metadata
    last = pieces.pop() if trailers else pieces[-1]
    streamed = [piece.request_body.response.body_mutation.streamed_response for piece in pieces]
    assert b"".join(piece.body for piece in streamed) == body
    assert [piece.end_of_stream for piece in streamed] == [False] * (len(streamed) - 1) + [not trailers]
    assert last.HasField("request_trailers") is trailers


def metadata_of(**more: str) -> pb.Metadata:
    named = messages.destination("10.0.0.1:80", EXPECTED).fields["envoy.lb"].struct_value
    named.update(more)
    return pb.Metadata(filter_metadata={"envoy.lb": named})


def test_the_destination_is_in_the_gateways_own_metadata_and_what_is_expected_of_it_comes_back_with_it() -> None:
    metadata = metadata_of()
    assert metadata.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "10.0.0.1:80"
    assert messages.expectation_of(metadata) == EXPECTED


@pytest.mark.parametrize(
    "more",
    [
        {"backhaul-expectation": ""},
        {"backhaul-expectation": "{"},
        {"backhaul-expectation": EXPECTED.told().replace("5", "-5")},
        {"backhaul-expectation": EXPECTED.told().replace("d1", "d" * 2000)},
        {"x-gateway-destination-endpoint-served": "10.0.0.2:80"},
    ],
    ids=["empty", "no object", "impossible", "long", "another engine's"],
)
def test_any_other_tells_nothing(more: dict[str, str]) -> None:
    assert messages.expectation_of(metadata_of(**more)) is None
    assert messages.expectation_of(pb.Metadata()) is None
