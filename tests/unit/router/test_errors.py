"""Errors as clients see them."""

import json

import pytest

from backhaul_router.core.errors import ApiError, engine_answer
from backhaul_router.core.misses import claim_refused, handle_refused


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 415, 429, 500, 502, 503, 504])
def test_every_error_has_openais_form(status: int) -> None:
    error = json.loads(ApiError(status, "why").body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert error["message"] == "why"


def test_an_error_inside_a_stream_is_one_event() -> None:
    event = ApiError(502, "why").event_at("/v1/chat/completions")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2


def test_an_engines_error_keeps_its_words() -> None:
    body = b'{"error": {"message": "maximum context length is 4000", "type": "Bad", "param": "x", "code": 400}}'
    error = engine_answer(400, body, {"Retry-After": "3", "server": "uvicorn"})
    assert json.loads(error.body) == json.loads(body)
    assert error.headers == {"Retry-After": "3"}


@pytest.mark.parametrize("body", [b"", b"no", b"[]", b'{"error": "x"}', b'{"detail": "x"}', b"\xff"])
def test_an_odd_error_of_an_engine_still_makes_sense(body: bytes) -> None:
    error = json.loads(engine_answer(422, body, {}).body)["error"]
    assert error["message"]


@pytest.mark.parametrize("odd", [{"x": 1}, [1], True, 1.5])
def test_what_is_of_another_kind_in_an_engines_error_is_left_out(odd: object) -> None:
    body = json.dumps({"error": {"message": "no", "type": "Bad", "param": odd, "code": odd}}).encode()
    error = engine_answer(400, body, {})
    assert (error.param, error.code, error.message) == (None, "invalid_request", "no")


def test_an_error_is_never_long() -> None:
    long = "x" * 2_000_000
    assert len(ApiError(404, long, type=long, code=long, param=long).body) < 10_000


def test_reasons_of_peers_become_plain_labels() -> None:
    assert claim_refused("SET_CLAIMED") == "claim:set_claimed"
    assert handle_refused("min verified\n<x>") == "refused:min_verified_x_"
    assert len(handle_refused("x" * 1000)) < 50
    assert claim_refused("") == "claim:unknown"
