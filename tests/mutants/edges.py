"""Mutants of what the router does at the edges: odd clients, odd engines, and those who have left."""

from tests.mutants.mutant import Mutant

_SOURCE = "services/router/src/backhaul_router"
_UNIT, _INTEGRATION = "tests/unit/router", "tests/integration"
_EDGES = f"{_INTEGRATION}/test_router_edges.py"

MUTANTS = (
    Mutant(
        "fail-on-impossible-tokens",
        f"{_SOURCE}/core/candidates.py",
        "    except OverflowError:",
        "    except KeyError:",
        (f"{_UNIT}/test_candidates.py::test_tokens_that_no_model_has_do_not_match",),
    ),
    Mutant(
        "believe-impossible-counts",
        f"{_SOURCE}/core/legs.py",
        "return verdict if all(0 <= count <= MAX_TOKENS for count in counts) else None",
        "return verdict",
        (f"{_UNIT}/test_legs.py::test_counts_that_cannot_be_are_not_believed_and_the_hand_off_stands",),
    ),
    Mutant(
        "repeat-errors-at-any-length",
        f"{_SOURCE}/core/errors.py",
        "self.message = bounded(message, MAX_MESSAGE)",
        "self.message = message",
        (f"{_UNIT}/test_errors.py::test_an_error_is_never_long",),
    ),
    Mutant(
        "repeat-odd-param",
        f"{_SOURCE}/core/errors.py",
        "param=param if isinstance(param, str) else None",
        "param=str(param)",
        (f"{_UNIT}/test_errors.py::test_what_is_of_another_kind_in_an_engines_error_is_left_out",),
    ),
    Mutant(
        "lose-late-replies",
        f"{_SOURCE}/late_replies.py",
        "                late(task.result())\n",
        "                pass\n",
        (
            f"{_UNIT}/test_late_replies.py::test_a_late_reply_is_taken_and_a_late_failure_is_not",
            f"{_INTEGRATION}/test_router_cancellation.py::"
            "test_a_hand_off_whose_client_left_just_before_it_was_told_is_freed",
        ),
    ),
    Mutant(
        "wait-for-any-number-of-late-replies",
        f"{_SOURCE}/late_replies.py",
        "READ_ON_S if len(self._left) < self._limit else 0.0",
        "READ_ON_S",
        (f"{_UNIT}/test_late_replies.py::test_nothing_is_waited_for_beyond_the_time_the_limit_or_the_end",),
    ),
    Mutant(
        "take-any-end-for-the-end",
        f"{_SOURCE}/answers.py",
        "        if not self._lines.done:\n",
        "        if False:\n",
        (f"{_EDGES}::test_a_stream_that_ends_without_saying_so_is_broken",),
    ),
    Mutant(
        "stream-handles",
        f"{_SOURCE}/core/clean_lines.py",
        "        return line.replace(data, without_params(data))\n",
        "        return line\n",
        (f"{_EDGES}::test_no_event_carries_handles",),
    ),
    Mutant(
        "stream-handles-in-long-events",
        f"{_SOURCE}/core/clean_lines.py",
        "        if _PARAMS_LEFT.search(shown):\n",
        "        if False:\n",
        (f"{_UNIT}/test_legs.py::test_handles_that_cannot_be_taken_out_are_not_passed_on",),
    ),
    Mutant(
        "compare-kinds-by-case",
        f"{_SOURCE}/core/sse.py",
        '.strip().lower() == "text',
        '.strip() == "text',
        (f"{_EDGES}::test_kinds_of_content_are_the_same_in_capitals",),
    ),
    Mutant(
        "pass-on-half-a-document",
        f"{_SOURCE}/legs.py",
        "            if not is_object(whole):\n",
        "            if False:\n",
        (f"{_EDGES}::test_what_is_no_answer_is_an_engines_fault[half a document]",),
    ),
    Mutant(
        "pass-on-any-status",
        f"{_SOURCE}/engine_client.py",
        "400 <= response.status < 600)",
        "400 <= response.status)",
        (f"{_EDGES}::test_what_is_no_answer_is_an_engines_fault[999]",),
    ),
    Mutant(
        "hold-any-answer",
        f"{_SOURCE}/engine_client.py",
        "                if byte_count > self._answer_bytes:\n",
        "                if False:\n",
        (f"{_EDGES}::test_a_whole_answer_is_read_up_to_a_limit",),
    ),
    Mutant(
        "wait-for-a-body-that-has-ended",
        f"{_SOURCE}/http_protocol.py",
        "        if body is None or body.is_eof():\n",
        "        if True:\n",
        (f"{_EDGES}::test_a_body_that_its_client_does_not_finish_ends_at_once",),
    ),
    Mutant(
        "reset-connections-that-wait-to-be-accepted",
        f"{_SOURCE}/http_listener.py",
        "await asyncio.gather(*map(self._take, waiting))",
        "[connection.close() for connection in waiting]",
        (f"{_EDGES}::test_connections_that_clients_have_when_the_port_closes_are_served",),
    ),
    Mutant(
        "close-connections-on-which-clients-ask",
        f"{_SOURCE}/http_protocol.py",
        "            if connection not in asking:\n",
        "            if True:\n",
        (f"{_EDGES}::test_a_client_that_asks_while_idle_connections_are_closed_is_answered",),
    ),
    Mutant(
        "make-room-by-who-asks",
        f"{_SOURCE}/http_protocol.py",
        "_is_idle(each) and not _readable([each])",
        "_is_idle(each)",
        (f"{_EDGES}::test_room_is_made_by_a_connection_on_which_nobody_asks",),
    ),
    Mutant(
        "close-new-connections-at-once",
        f"{_SOURCE}/http_service.py",
        "        await asyncio.sleep(_FIRST_REQUEST_S)\n",
        "",
        (
            f"{_INTEGRATION}/test_router_drain.py::test_a_client_that_has_just_connected_when_the_port_closes_is_answered",
        ),
    ),
    Mutant(
        "log-clients-mistakes",
        f"{_SOURCE}/http_protocol.py",
        'if not isinstance(kw.get("exc_info"), web.RequestPayloadError | PayloadEncodingError):',
        "if True:",
        (f"{_EDGES}::test_a_body_in_another_encoding_than_it_says_is_no_fault_of_the_router[gzip-/v1/nothing]",),
    ),
    Mutant(
        "take-more-than-open-files-allow",
        f"{_SOURCE}/app.py",
        "    affordable = config.within(allowed)\n",
        "    affordable = config\n",
        (
            f"{_INTEGRATION}/test_router_shedding.py::"
            "test_a_router_that_may_open_few_files_serves_within_them_and_refuses_the_rest",
        ),
    ),
)
