"""Heads of requests and answers whose bytes a gateway moves."""

import pytest

from backhaul_router.core.body import Endpoint
from backhaul_router.core.engines import Failure
from backhaul_router.core.errors import ApiError
from backhaul_router.core.gateway import (
    comes_whole,
    endpoint_of,
    failure_told,
    first_byte_s,
    not_for_clients,
    not_for_engines,
    own_answer,
)

HEAD = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json; charset=utf-8"}


def test_a_turn_is_known_by_its_path_whatever_the_query() -> None:
    assert endpoint_of({**HEAD, ":path": "/v1/completions?a=/v1/chat/completions"}, body_limit=1) is (
        Endpoint.COMPLETIONS
    )


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({":path": "/tokenize"}, 404),
        ({":path": "/v1/chat/completions/"}, 404),
        ({":path": ""}, 404),
        ({":method": "GET"}, 405),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-length": "11"}, 413),
        ({"content-length": "9" * 5000}, 413),
    ],
)
def test_any_other_request_is_refused(changed: dict[str, str], status: int) -> None:
    with pytest.raises(ApiError) as refused:
        endpoint_of({**HEAD, **changed}, body_limit=10)
    assert refused.value.status == status


def test_engines_get_no_header_of_a_client_that_can_be_taken_away() -> None:
    names = [":path", "host", "cookie", "x-data-parallel-rank", "x-envoy-peer", "x-request-id", "traceparent"]
    assert not_for_engines(names) == ["cookie", "x-data-parallel-rank", "x-request-id", "traceparent"]


def test_clients_get_what_means_something_to_them() -> None:
    names = [":status", "content-type", "content-length", "x-ratelimit-limit", "server", "x-internal-host"]
    assert not_for_clients(names) == ["server", "x-internal-host"]


@pytest.mark.parametrize(
    ("status", "details", "failure"),
    [
        (200, "via_upstream", None),
        (200, "", None),
        (400, "via_upstream", None),
        (500, "via_upstream", Failure.FAULT),
        (503, "", Failure.UNAVAILABLE),
        (503, "upstream_reset_before_response_started{remote_connection_failure|111}", Failure.REFUSED),
        (503, "upstream_reset_before_response_started{connection_timeout}", Failure.REFUSED),
        (503, "upstream_reset_before_response_started{connection_termination}", Failure.DISCONNECTED),
        (504, "upstream_response_timeout", Failure.TIMEOUT),
    ],
)
def test_how_an_engine_failed_is_told_by_who_answered(status: int, details: str, failure: Failure | None) -> None:
    assert failure_told(status, details) is failure


def test_an_answer_is_the_gateways_own_only_if_it_says_so() -> None:
    assert [own_answer(details) for details in ("", "via_upstream", "no_healthy_upstream")] == [False, False, True]


def test_only_a_successful_stream_of_events_does_not_come_whole() -> None:
    events = {"content-type": "text/event-stream; charset=utf-8"}
    assert not comes_whole(200, events)
    assert comes_whole(400, events)
    assert comes_whole(200, {"content-type": "application/json"})


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("1500000", 1.5), ("0", 0.0), ("-", None), ("", None), ("1.5", None), ("٣", None), ("9" * 5000, None)],
)
def test_when_an_answer_began_is_told_in_microseconds(told: str, seconds: float | None) -> None:
    assert first_byte_s(told) == seconds
