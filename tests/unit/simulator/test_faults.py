"""The script of what requests meet."""

import json
from typing import Any

import pytest

from backhaul_simulator.faults import Bare500, Die, Faults, Hang, Reset

CHAT = "/v1/chat/completions"


def _faults(*entries: dict[str, Any]) -> Faults:
    faults = Faults()
    faults.add(json.dumps({"next": entries}).encode())
    return faults


def test_each_entry_happens_as_often_as_it_says_and_in_order() -> None:
    faults = _faults({"fault": "hang", "times": 2}, {"fault": "bare_500"})

    taken = [faults.take(CHAT, b"{}") for _ in range(4)]

    assert [type(fault) for fault in taken] == [Hang, Hang, Bare500, type(None)]
    assert faults.left() == {"next": []}


@pytest.mark.parametrize(
    ("meant", "body"),
    [
        ({"path": CHAT}, {}),
        ({"stream": True}, {"stream": True}),
        ({"stream": False}, {}),
        ({"warm": True}, {"kv_transfer_params": {"remote_block_ids": [[1]], "do_remote_decode": True}}),
        ({"warm": False}, {"kv_transfer_params": {"remote_block_ids": [[1]], "do_remote_prefill": True}}),
        ({"warm": False}, {"kv_transfer_params": {"remote_block_ids": None, "do_remote_decode": True}}),
    ],
)
def test_a_request_that_is_meant_is_met(meant: dict[str, Any], body: dict[str, Any]) -> None:
    faults = _faults({"fault": "die", **meant})
    assert isinstance(faults.take(CHAT, json.dumps(body).encode()), Die)


@pytest.mark.parametrize(
    ("meant", "body"),
    [
        ({"path": "/tokenize"}, {}),
        ({"stream": True}, {}),
        ({"warm": True}, {"kv_transfer_params": {"remote_block_ids": [[1]]}}),
    ],
)
def test_others_pass_and_leave_the_script_as_it_is(meant: dict[str, Any], body: dict[str, Any]) -> None:
    faults = _faults({"fault": "die", **meant}, {"fault": "reset", "after": "end"})

    assert isinstance(faults.take(CHAT, json.dumps(body).encode()), Reset)
    assert [entry["fault"] for entry in faults.left()["next"]] == ["die"]


def test_a_share_of_the_requests_is_drawn_alike_in_every_process() -> None:
    scripts = [_faults({"fault": "bare_500", "share": 0.02, "times": 10_000}) for _ in range(2)]

    drawn = [[faults.take(CHAT, b"{}") is not None for _ in range(2_000)] for faults in scripts]

    assert drawn[0] == drawn[1]
    assert 20 <= sum(drawn[0]) <= 60
    assert scripts[0].left()["next"][0]["times"] == 10_000 - sum(drawn[0])


def test_whoever_is_not_drawn_meets_what_comes_next() -> None:
    faults = _faults({"fault": "hang", "share": 1e-9}, {"fault": "reset"})

    assert isinstance(faults.take(CHAT, b"{}"), Reset)


def test_a_body_that_cannot_be_read_is_a_request_like_any_other() -> None:
    assert isinstance(_faults({"fault": "hang"}).take(CHAT, b"\xff{"), Hang)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"next": [{"fault": "sulk"}]}', "Invalid value 'sulk'"),
        (b'{"next": [{"fault": "hang", "seconds": 3}]}', "unknown field `seconds`"),
        (b'{"next": [{"fault": "delay"}]}', "missing required field `seconds`"),
        (b'{"next": [{"fault": "die", "after": -1}]}', ">= 0"),
        (b'{"next": [{"fault": "hang", "times": 0}]}', ">= 1"),
        (b'{"next": [{"fault": "hang", "share": 0}]}', "> 0"),
        (b'{"now": []}', "unknown field `now`"),
    ],
)
def test_a_script_that_cannot_be_is_refused_whole(document: bytes, complaint: str) -> None:
    faults = Faults()
    with pytest.raises(ValueError, match=complaint):
        faults.add(document)
    assert faults.left() == {"next": []}


def test_a_script_can_be_forgotten() -> None:
    faults = _faults({"fault": "hang"})
    faults.clear()
    assert faults.take(CHAT, b"{}") is None
