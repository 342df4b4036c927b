"""A prefill engine uses of a handle what is proved equal to the prompt, and nothing that it cannot read."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_connector.prefill import Judgement, Layout, Prompt, judge, proof_of
from tests.fakes.block_sets import IDENTITY, handle, report

TOKENS = [*range(200)]
PROMPT = Prompt([*TOKENS, 9, 9], (), IDENTITY)
LAYOUT = Layout(block_size=16, trims=True)


def judged(
    params: dict[str, Any], prompt: Prompt = PROMPT, layout: Layout = LAYOUT, min_verified: int = 64
) -> Judgement:
    """Judges, and checks what holds of every answer."""
    given_params = msgspec.json.encode({key: value for key, value in params.items() if value == value})
    judgement = judge(params, prompt, layout, min_verified)
    assert msgspec.json.encode({key: value for key, value in params.items() if value == value}) == given_params
    assert judgement.params["do_remote_prefill"] is False
    assert (judgement.params["remote_block_ids"] is None) == bool(judgement.refused)
    assert set(judgement.params) >= set(params)
    return judgement


def test_a_handle_that_the_prompt_begins_with_is_used_whole() -> None:
    params = handle(report(tokens=TOKENS))

    assert judged(params) == Judgement(params, verified=200)


def test_a_handle_for_another_continuation_is_cut_to_the_common_start() -> None:
    prompt = Prompt([*TOKENS[:150], 9, 9, 9], (), IDENTITY)

    judgement = judged(handle(report(tokens=TOKENS)), prompt)

    assert judgement.verified == judgement.params["remote_num_tokens"] == 128
    assert judgement.params["remote_block_ids"] == [[*range(100, 108)]]


@given(
    common=st.integers(0, 400),
    set_count=st.integers(1, 400),
    block_size=st.sampled_from([8, 16, 48, 64, 128]),
    min_verified=st.integers(-1, 200),
)
def test_what_is_kept_is_proved_and_has_exactly_the_blocks_that_it_needs(
    common: int, set_count: int, block_size: int, min_verified: int
) -> None:
    common = min(common, set_count)
    made = report(tokens=[*range(set_count)], block_size=block_size)
    prompt = Prompt([*range(common), 999_999], (), IDENTITY)

    judgement = judged(handle(made), prompt, Layout(block_size, trims=True), min_verified)

    if judgement.refused:
        assert judgement.refused == "too_short"
        assert judgement.verified < max(1, min_verified)
    else:
        assert max(1, min_verified) <= judgement.verified <= common
        assert judgement.params["remote_num_tokens"] == judgement.verified
        blocks = made.params["remote_block_ids"][0]
        assert judgement.params["remote_block_ids"] == [blocks[: math.ceil(judgement.verified / block_size)]]


@given(one=st.binary(min_size=16, max_size=16), other=st.binary(min_size=16, max_size=16))
def test_nothing_is_verified_for_another_identity(one: bytes, other: bytes) -> None:
    params = handle(report(tokens=TOKENS))
    params["backhaul"]["identity"] = one.hex()

    judgement = judged(params, Prompt(TOKENS, (), other))

    assert judgement.verified == 0
    assert judgement.refused == ("too_short" if one == other else "identity")


def test_the_identity_is_in_the_anchors_too() -> None:
    params = handle(report(tokens=TOKENS))
    params["backhaul"]["identity"] = (b"o" * 16).hex()

    assert judged(params, Prompt(TOKENS, (), b"o" * 16)).refused == "too_short"


def test_a_prompt_with_another_image_is_not_proved() -> None:
    judgement = judged(handle(report(tokens=TOKENS)), Prompt(TOKENS, [(70, b"image")], IDENTITY))

    assert judgement.verified == 64


@pytest.mark.parametrize(
    ("prompt", "refusal"),
    [
        pytest.param(Prompt(TOKENS, None, IDENTITY), "unhashed_prompt", id="an image without a hash"),
        pytest.param(Prompt(TOKENS, (), None), "weights_unknown", id="weights not digested yet"),
        pytest.param(Prompt((), (), IDENTITY), "too_short", id="no tokens"),
        pytest.param(Prompt(TOKENS[:63], (), IDENTITY), "too_short", id="less than a stride"),
    ],
)
def test_a_prompt_that_cannot_be_proved_is_refused(prompt: Prompt, refusal: str) -> None:
    assert judged(handle(report(tokens=TOKENS)), prompt).refused == refusal


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"layout": Layout(16, trims=False)}, id="this engine has several groups"),
        pytest.param({"layout": Layout(32, trims=True)}, id="another block size"),
        pytest.param({"remote_block_ids": [[1] * 13, [1] * 13]}, id="that engine has several groups"),
        pytest.param({"remote_block_ids": [[1] * 12]}, id="a block too few"),
        pytest.param({"dcp_size": 2}, id="context parallel"),
        pytest.param({"pp_size": 2}, id="pipeline parallel"),
    ],
)
def test_a_handle_that_may_not_be_cut_is_used_whole_or_not_at_all(changes: dict[str, Any]) -> None:
    layout = changes.pop("layout", LAYOUT)
    params = handle(report(tokens=TOKENS), **changes)

    assert judged(params, PROMPT, layout).refused == ""
    assert judged(params, Prompt(TOKENS[:150], (), IDENTITY), layout).refused == "layout"


@pytest.mark.parametrize("count", [199, 201])
def test_a_handle_that_names_another_count_than_its_proof_is_cut_to_the_proof(count: int) -> None:
    judgement = judged(handle(report(tokens=TOKENS), remote_num_tokens=count))

    assert judgement.params["remote_num_tokens"] == judgement.verified == 200
    assert judgement.params["remote_block_ids"] == [[*range(100, 113)]]


def test_a_handle_is_cut_in_the_middle_of_a_block() -> None:
    made = report(tokens=TOKENS, block_size=48)

    judgement = judged(handle(made), Prompt(TOKENS[:100], (), IDENTITY), Layout(48, trims=True))

    assert judgement.params["remote_num_tokens"] == 64
    assert judgement.params["remote_block_ids"] == [[100, 101]]


@pytest.mark.parametrize("min_verified", [-1, 0])
def test_a_handle_of_which_nothing_is_proved_is_dropped_however_little_is_asked_for(min_verified: int) -> None:
    assert judged(handle(report(tokens=TOKENS)), Prompt([7], (), IDENTITY), LAYOUT, min_verified).refused == "too_short"


def test_a_handle_never_passes_for_a_hand_off() -> None:
    assert judged(handle(report(tokens=TOKENS), do_remote_prefill=True)).verified == 200
    assert judged(handle(report(tokens=TOKENS), do_remote_prefill=True, backhaul=None)).refused == "unproved"


HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_block_ids", "abcdefghijklm"),
        ("remote_block_ids", ["abcdefghijklm"]),
        ("remote_block_ids", [["1"] * 13]),
        ("remote_block_ids", [[1.0] * 13]),
        ("remote_block_ids", [[True] * 13]),
        ("remote_block_ids", [[-1] * 13]),
        ("remote_block_ids", [[HUGE] * 13]),
        ("remote_block_ids", [1] * 13),
        ("remote_block_ids", {"0": [1] * 13}),
        ("remote_block_ids", []),
        ("remote_block_ids", 7),
        ("remote_num_tokens", 200.0),
        ("remote_num_tokens", "200"),
        ("remote_num_tokens", -200),
        ("remote_num_tokens", 0),
        ("remote_num_tokens", True),
        ("remote_num_tokens", HUGE),
        ("remote_num_tokens", None),
        ("remote_blocks_expiry_time", math.nan),
        ("remote_blocks_expiry_time", math.inf),
        ("remote_blocks_expiry_time", -math.inf),
        ("remote_blocks_expiry_time", HUGE),
        ("remote_blocks_expiry_time", True),
        ("remote_blocks_expiry_time", "500"),
        ("remote_engine_id", None),
        ("remote_engine_id", ["engine-d"]),
        ("remote_request_id", 5),
        ("remote_host", None),
        ("remote_port", "5601"),
        ("remote_port", 0),
        ("remote_port", 70_000),
        ("tp_size", "1"),
        ("tp_size", 0),
        ("dcp_size", 1.0),
        ("pp_size", None),
    ],
)
def test_a_handle_that_would_harm_the_engine_is_refused(name: str, value: object) -> None:
    assert judged(handle(report(tokens=TOKENS), **{name: value})).refused == "malformed"


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"])
def test_a_handle_that_lacks_a_field_is_refused(name: str) -> None:
    params = handle(report(tokens=TOKENS))
    del params[name]

    assert judged(params).refused == "malformed"


def test_a_handle_without_a_deadline_is_refused() -> None:
    params = handle(report(tokens=TOKENS))

    assert judged({**params, "remote_blocks_expiry_time": None}).refused == "no_deadline"
    del params["remote_blocks_expiry_time"]
    assert judged(params).refused == "no_deadline"


def test_a_deadline_may_come_as_an_integer() -> None:
    deadline = judged(handle(report(tokens=TOKENS), remote_blocks_expiry_time=500)).params["remote_blocks_expiry_time"]

    assert deadline == 500.0
    assert isinstance(deadline, float)


@pytest.mark.parametrize(
    "changes",
    [
        {"scope": None},
        {"identity": "no hex"},
        {"anchors": "no hex"},
        {"anchors": ""},
        {"anchors": "00" * 16},
        {"anchors": "00" * 16 * 5},
        {"stride": 0},
        {"stride": -64},
        {"stride": 1},
        {"stride": 64.0},
        {"stride": 48},
        {"spacing": 0},
        {"spacing": 65},
        {"spacing": True},
        {"token_count": 0},
        {"token_count": -200},
        {"token_count": HUGE},
        {"token_count": "200"},
        {"version": 2},
    ],
    ids=str,
)
def test_a_proof_that_cannot_be_read_proves_nothing(changes: dict[str, Any]) -> None:
    params = handle(report(tokens=TOKENS))
    params["backhaul"].update(changes)

    assert judged(params).refused == "unproved"


def test_huge_numbers_in_a_proof_prove_nothing() -> None:
    params = handle(report(tokens=TOKENS))
    params["backhaul"].update(stride=HUGE, spacing=HUGE, token_count=HUGE, anchors="00" * 32)

    assert judged(params).refused == "too_short"


@pytest.mark.parametrize("proof", [None, 5, "proof", [], {}, {"scope": "s", "keys": []}])
def test_anything_but_a_proof_is_none(proof: object) -> None:
    assert proof_of({"backhaul": proof}) is None
    assert proof_of({}) is None
