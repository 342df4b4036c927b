"""Mutants of what a gRPC listener takes before anything knows who calls."""

from tests.mutants.mutant import Mutant

_COMMON = "services/common/src/backhaul_common"
_SERVER, _LIMIT, _RECEIVING = f"{_COMMON}/grpc_server.py", f"{_COMMON}/call_limit.py", f"{_COMMON}/receiving.py"
_CONNECTIONS = "tests/unit/common/test_grpc_connections.py"
_CALLS = "tests/unit/common/test_call_limit.py"
_REQUESTS = "tests/unit/common/test_receiving.py"

MUTANTS = (
    Mutant(
        "unpack-any-message",
        _SERVER,
        "_OPTIONS = (\n    NO_COMPRESSION,\n",
        "_OPTIONS = (\n",
        (f"{_CONNECTIONS}::test_a_packed_message_is_refused_before_it_is_unpacked",),
    ),
    Mutant(
        "unpack-a-peers-answer",
        f"{_COMMON}/grpc_client.py",
        "= (\n    NO_COMPRESSION,\n",
        "= (\n",
        (f"{_CONNECTIONS}::test_a_packed_answer_of_a_peer_is_refused_before_it_is_unpacked",),
    ),
    Mutant(
        "take-any-number-of-connections",
        _SERVER,
        '("grpc.max_allowed_incoming_connections", max_connections),',
        "",
        (f"{_CONNECTIONS}::test_connections_beyond_the_limit_are_closed_and_those_that_stand_go_on",),
    ),
    Mutant(
        "keep-idle-connections",
        _SERVER,
        "if idle_s else ()",
        "if not idle_s else ()",
        (f"{_CONNECTIONS}::test_a_connection_without_calls_is_closed_and_clients_call_on_over_another",),
    ),
    Mutant(
        "count-no-watches",
        _LIMIT,
        '"watches": MAX_WATCHES}',
        '"watches": 10**6}',
        (f"{_CALLS}::test_watches_of_health_and_reflection_have_a_limit_of_their_own_and_shut_nothing_else_out",),
    ),
    Mutant(
        "refuse-only-what-has-come",
        _LIMIT,
        "self._refusal(kind), request_streaming=True)",
        "self._refusal(kind), request_streaming=False)",
        (f"{_CALLS}::test_a_method_of_any_kind_is_refused_before_its_request_has_come",),
    ),
    Mutant(
        "wait-for-requests-for-ever",
        _RECEIVING,
        "asyncio.timeout(limit_s)",
        "asyncio.timeout(None)",
        (f"{_REQUESTS}::test_places_of_calls_whose_requests_do_not_come_are_free_again",),
    ),
    Mutant(
        "hurry-streams-that-have-begun",
        _RECEIVING,
        "limit_s, self._limit_s = self._limit_s, None",
        "limit_s = self._limit_s",
        (f"{_REQUESTS}::test_a_stream_that_has_begun_may_be_silent",),
    ),
    Mutant(
        "take-bad-messages-for-faults",
        _RECEIVING,
        "except DecodeError:",
        "except ZeroDivisionError:",
        (
            f"{_REQUESTS}::test_a_message_that_is_none_is_told_so_and_leaves_no_trace_in_the_log",
            f"{_REQUESTS}::test_a_later_message_that_is_none_ends_its_stream_in_the_same_way",
        ),
    ),
    Mutant(
        "close-the-newest-scraper",
        f"{_COMMON}/exposition.py",
        "self.connections[:-MAX_CONNECTIONS]",
        "self.connections[MAX_CONNECTIONS:]",
        ("tests/unit/common/test_exposition.py::test_who_opens_many_connections_keeps_no_scraper_out",),
        fixtures=True,
    ),
)
