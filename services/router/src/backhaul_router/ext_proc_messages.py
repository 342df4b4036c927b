"""Messages of Envoy's external processing protocol."""

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from google.protobuf import struct_pb2

from backhaul.envoy.v3 import ext_proc_pb2 as pb
from backhaul_router.core import gateway
from backhaul_router.core.errors import ApiError
from backhaul_router.core.expectation import Expectation, expectation_in

_LB = "envoy.lb"
_SUBSET_HINT = "envoy.lb.subset_hint"
_DETAILS = "response.code_details"

_PIECE_BYTES = 256 * 1024
"""Of a body that is sent in pieces: a message of many megabytes would hold up others on the same connection."""

_STATUS = re.compile("[1-5][0-9]{2}")

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


# From the gateway


def headers_in(message: pb.HttpHeaders) -> dict[str, str]:
    """Returns headers by their lower-case names, the first of several of one name."""
    headers: dict[str, str] = {}
    for header in message.headers.headers:
        headers.setdefault(header.key.lower(), _text(header))
    return headers


def status_in(headers: Mapping[str, str]) -> int:
    """Returns the status of an answer; 502 for one that has none."""
    status = headers.get(":status", "")
    return int(status) if _STATUS.fullmatch(status) else 502


def subset_in(request: pb.ProcessingRequest) -> frozenset[str] | None:
    """Returns the endpoints that may be picked, None where the gateway names none: all may."""
    hint = _metadata(request.metadata_context, _SUBSET_HINT, gateway.SUBSET)
    if hint is None:
        return None
    values = hint.list_value.values if hint.HasField("list_value") else [hint]
    named = (name.strip() for value in values for name in value.string_value.split(","))
    return frozenset(filter(None, named))


def served_in(request: pb.ProcessingRequest) -> str:
    """Returns the endpoint that served a request; empty when the gateway does not say."""
    value = _metadata(request.metadata_context, _LB, gateway.SERVED)
    return value.string_value if value is not None else ""


def expectation_of(metadata: pb.Metadata) -> Expectation | None:
    """Returns what was expected of a request's decode leg; None where no picker said, or another engine served it."""
    value = _metadata(metadata, _LB, gateway.EXPECTATION)
    expectation = expectation_in(value.string_value) if value is not None else None
    served = _metadata(metadata, _LB, gateway.SERVED)
    if expectation is None or (served is not None and served.string_value not in ("", expectation.endpoint)):
        return None
    return expectation


def details_in(request: pb.ProcessingRequest) -> str:
    """Returns where an answer comes from, in Envoy's words; empty when the gateway does not say."""
    found = (
        values.fields[_DETAILS].string_value for values in request.attributes.values() if _DETAILS in values.fields
    )
    return next(found, "")


def _metadata(metadata: pb.Metadata, namespace: str, key: str) -> struct_pb2.Value | None:
    namespaces = metadata.filter_metadata
    if namespace not in namespaces or key not in namespaces[namespace].fields:
        return None
    return namespaces[namespace].fields[key]


def _text(header: pb.HeaderValue) -> str:
    # As aiohttp does: headers may hold any bytes.
    return header.raw_value.decode("utf-8", "surrogateescape") if header.raw_value else header.value


# To the gateway


def mutation(set_headers: Mapping[str, str], remove_headers: Iterable[str] = ()) -> pb.HeaderMutation:
    """Returns what becomes of headers."""
    options = [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode("utf-8", "surrogateescape")),
            append_action=_OVERWRITE,
        )
        for name, value in set_headers.items()
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=remove_headers)


def destination(endpoint: str, expectation: Expectation) -> struct_pb2.Struct:
    """Returns the metadata that names an endpoint, ip:port, and what is expected of it."""
    # By this name the gateway says who served a request.
    told = msgspec.structs.replace(expectation, endpoint=endpoint).told()
    named = {gateway.DESTINATION: endpoint, gateway.EXPECTATION: told}
    inner = struct_pb2.Struct(fields={name: struct_pb2.Value(string_value=value) for name, value in named.items()})
    return struct_pb2.Struct(fields={_LB: struct_pb2.Value(struct_value=inner)})


def at_once(headers: pb.HeaderMutation, body: bytes, metadata: struct_pb2.Struct) -> Iterator[pb.ProcessingResponse]:
    """Yields the answer to a request's whole body that was sent in one message."""
    response = pb.CommonResponse(header_mutation=headers, body_mutation=pb.BodyMutation(body=body))
    yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=response), dynamic_metadata=metadata)


def in_pieces(
    headers: pb.HeaderMutation, body: bytes, metadata: struct_pb2.Struct, *, trailers: bool
) -> Iterator[pb.ProcessingResponse]:
    """Yields the answer to a request's headers, its body and its trailers, if it had some."""
    yield pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=headers)),
        dynamic_metadata=metadata,
    )
    for start in range(0, len(body), _PIECE_BYTES):
        last = start + _PIECE_BYTES >= len(body) and not trailers
        piece = pb.StreamedBodyResponse(body=body[start : start + _PIECE_BYTES], end_of_stream=last)
        response = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece))
        yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=response))
    if trailers:
        yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())


def answer_head(headers: pb.HeaderMutation, *, whole: bool) -> pb.ProcessingResponse:
    """Returns the answer to an answer's headers. ``whole`` asks for its body."""
    response = pb.ProcessingResponse(
        response_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=headers))
    )
    if whole:
        response.mode_override.response_body_mode = pb.BUFFERED
    return response


def replacement(error: ApiError, request_id: str, path: str) -> pb.ProcessingResponse:
    """Returns the answer to the headers of an answer of the gateway's own, which becomes this one."""
    body = error.body_at(path)
    response = pb.CommonResponse(
        status=pb.CommonResponse.CONTINUE_AND_REPLACE,
        header_mutation=mutation(
            {":status": str(error.status), **_of_error(error, request_id), "content-length": str(len(body))}
        ),
        body_mutation=pb.BodyMutation(body=body),
    )
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=response))


def answer_body(body: bytes) -> pb.ProcessingResponse:
    """Returns the answer to an answer's whole body."""
    response = pb.CommonResponse(
        header_mutation=mutation({"content-length": str(len(body))}), body_mutation=pb.BodyMutation(body=body)
    )
    return pb.ProcessingResponse(response_body=pb.BodyResponse(response=response))


def same_piece(body: pb.HttpBody) -> pb.ProcessingResponse:
    """Returns the answer to a piece of an answer's body, which stays as it is."""
    piece = pb.StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    response = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece))
    return pb.ProcessingResponse(response_body=pb.BodyResponse(response=response))


def refusal(error: ApiError, request_id: str, path: str) -> pb.ProcessingResponse:
    """Returns an answer to the client, in place of an engine's."""
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=error.status),
            headers=mutation(_of_error(error, request_id)),
            body=error.body_at(path),
            details=f"backhaul_{error.status}",
        )
    )


def _of_error(error: ApiError, request_id: str) -> dict[str, str]:
    return {"content-type": "application/json", **error.headers, "x-request-id": request_id}
