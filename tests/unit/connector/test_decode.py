"""A decode engine reports of a labelled turn what it covers and how to find it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_common.errors import InvalidArgumentError
from backhaul_connector.anchors import Anchors, verified_count
from backhaul_connector.decode import OpenTurn, label_of, opened, settled
from backhaul_connector.wire import BlockSetReport, TurnLabel
from backhaul_registry.core.rules import check_id
from tests.fakes.block_sets import IDENTITY, engine_params

LABEL = {"scope": "scope", "keys": ["key-1", "key-2"]}
UNREADABLE = TurnLabel(scope="", keys=[])


def open_turn(tokens: list[int], label: TurnLabel | None = None) -> OpenTurn:
    label = label or TurnLabel(scope="scope", keys=["key-1", "key-2"], continues=["key-0"])
    return OpenTurn(label, identity=IDENTITY, tokens=tokens, extras=(), block_size=16, now=17.5)


def reported(turn: OpenTurn, params: dict[str, Any]) -> BlockSetReport:
    """Closes a turn, and digests it to its end."""
    assert turn.close(params, 500.0, now=20.0)
    while not turn.done:
        assert turn.advance(1_000)
    return turn.report()


def test_a_labelled_turn_has_its_label() -> None:
    assert label_of({"backhaul": LABEL, "do_remote_prefill": True}) == TurnLabel(scope="scope", keys=["key-1", "key-2"])


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(None, id="no params"),
        pytest.param({}, id="empty params"),
        pytest.param({"do_remote_prefill": True}, id="no label"),
        pytest.param({"do_remote_decode": True, "backhaul": LABEL}, id="a prefill leg"),
    ],
)
def test_other_turns_are_not_ours(params: dict[str, Any] | None) -> None:
    assert label_of(params) is None


@pytest.mark.parametrize(
    "label",
    [
        None,
        5,
        "label",
        {},
        {"scope": "s"},
        {"scope": 5, "keys": []},
        {"scope": "s", "keys": "k"},
        {"scope": "s", "keys": [5]},
        {"scope": "s", "keys": ["\ud800"]},
        {"scope": "\ud800", "keys": ["k"]},
        {"scope": "s", "keys": ["k\n"]},
        {"scope": "s", "keys": [""]},
        {"scope": "s", "keys": ["k" * 129]},
        {"scope": "s", "keys": ["k"] * 33},
        {"scope": "s", "keys": ["k"], "continues": ["k"] * 5},
        {"scope": "s", "keys": ["k"], "continues": ["k\n"]},
        {"scope": "s", "keys": ["k"], "traceparent": 1},
    ],
    ids=repr,
)
def test_a_label_that_cannot_be_read_has_no_keys(label: object) -> None:
    assert label_of({"backhaul": label}) == UNREADABLE


def test_what_a_newer_router_says_besides_costs_no_blocks() -> None:
    assert label_of({"backhaul": {**LABEL, "other": 1}}) == TurnLabel(scope="scope", keys=["key-1", "key-2"])


def test_a_report_names_the_turn_as_its_label_does() -> None:
    turn = open_turn([*range(100)], TurnLabel(scope="scope", keys=["key"], traceparent="00-1-2-01"))

    assert reported(turn, engine_params("set-1", 99)).traceparent == "00-1-2-01"


@pytest.mark.parametrize("character", sorted({*map(chr, range(0x20, 0x80)), "\n", "é"}))
def test_a_label_takes_the_names_that_the_registry_takes(character: str) -> None:
    try:
        check_id(character, "key")
        expected = TurnLabel(scope=character, keys=[character])
    except InvalidArgumentError:
        expected = UNREADABLE

    assert label_of({"backhaul": {"scope": character, "keys": [character]}}) == expected


@pytest.mark.parametrize(
    ("keys", "identity", "extras", "retained"),
    [
        pytest.param(["key"], IDENTITY, [], True, id="can be found and proved"),
        pytest.param([], IDENTITY, [], False, id="no keys"),
        pytest.param(["key"], None, [], False, id="weights not known"),
        pytest.param(["key"], IDENTITY, None, False, id="a prompt that cannot be proved"),
    ],
)
def test_a_turn_that_nothing_can_come_back_for_retains_nothing(
    keys: list[str], identity: bytes | None, extras: list[tuple[int, bytes]] | None, retained: bool
) -> None:
    label = TurnLabel(scope="scope", keys=keys)

    turn = opened(label, identity=identity, tokens=[*range(100)], extras=extras, block_size=16, now=0.0)

    assert (turn is not None) is retained


@given(limits=st.lists(st.integers(1, 200)), prompt_count=st.integers(1, 300), output_count=st.integers(0, 200))
def test_a_report_proves_all_that_is_covered_and_each_token_is_digested_once(
    limits: list[int], prompt_count: int, output_count: int
) -> None:
    tokens = [*range(prompt_count)]
    turn, digested = open_turn(tokens), 0
    for limit in limits:
        digested += (count := turn.advance(limit))
        assert count <= limit
        if len(tokens) < prompt_count + output_count:
            tokens.append(len(tokens))
    tokens.extend(range(len(tokens), prompt_count + output_count))
    covered = len(tokens) - 1

    assert turn.close(engine_params("set-1", covered), 500.0, now=20.0)
    digested += turn.advance(1_000)
    assert (turn.done, digested, turn.advance(1_000)) == (True, covered, 0)
    report = turn.report()

    assert (report.set_id, report.scope, report.keys, report.deadline) == ("set-1", "scope", ["key-1", "key-2"], 500.0)
    assert (report.token_count, report.block_count) == (covered, -(-covered // 16))
    assert (report.claimed, report.continues, report.ended_at, report.turn_s) == (False, ["key-0"], 20.0, 2.5)
    anchors = Anchors(report.identity, report.stride, report.spacing, report.token_count, report.anchors)
    assert anchors.complete
    assert verified_count(anchors, tokens) == covered


def test_the_last_token_of_a_turn_that_runs_is_not_digested() -> None:
    assert open_turn([*range(64)]).advance(1_000) == 0
    assert open_turn([*range(65)]).advance(1_000) == 64


@pytest.mark.parametrize(("covered", "closes"), [(63, False), (64, True), (119, True), (120, True), (121, False)])
def test_a_turn_that_covers_less_than_was_digested_or_more_than_there_is_is_not_reported(
    covered: int, closes: bool
) -> None:
    turn = open_turn([*range(120)])
    turn.advance(1_000)

    assert turn.close(engine_params("s", covered), 500.0, now=20.0) is closes


def test_a_deadline_that_the_engine_moved_before_the_report_is_the_reports() -> None:
    turn = open_turn([*range(100)])
    assert turn.close(engine_params("s", 99), 500.0, now=20.0)
    turn.deadline = 400.0
    turn.advance(100)

    assert turn.report().deadline == 400.0


def test_the_params_of_a_report_are_a_copy() -> None:
    params = engine_params("set-1", 100)
    report = reported(open_turn([*range(100)]), params)
    params["remote_host"] = "elsewhere"

    assert report.params["remote_host"] == "127.0.0.1"


def test_blocks_of_all_groups_are_counted() -> None:
    params = engine_params("set-1", 100, remote_block_ids=([1, 2, 3], [4, 5]))

    assert reported(open_turn([*range(100)]), params).block_count == 5


@pytest.mark.parametrize(
    ("in_flight", "count", "ids"),
    [
        pytest.param(0, 97, [[1, 2, 3, 4]], id="nothing in flight"),
        pytest.param(1, 96, [[1, 2, 3]], id="one token, the only one of its block"),
        pytest.param(2, 95, [[1, 2, 3]], id="two tokens"),
    ],
)
def test_tokens_of_a_step_in_flight_are_not_reported(in_flight: int, count: int, ids: list[list[int]]) -> None:
    given = {"remote_num_tokens": 97, "remote_block_ids": ([1, 2, 3, 4],), "remote_port": 5}

    cut = settled(given, in_flight, block_size=32)

    assert (cut["remote_num_tokens"], [list(group) for group in cut["remote_block_ids"]]) == (count, ids)
    assert cut["remote_port"] == 5
    assert given["remote_num_tokens"] == 97
