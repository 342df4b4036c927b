"""Mutants of what is kept from who sends too much, and of what is kept to oneself."""

from tests.mutants.mutant import Mutant

_ROUTER = "services/router/src/backhaul_router"
_COMMON = "services/common/src/backhaul_common"
_AGENT = "services/node-agent/src/backhaul_node_agent"
_BODIES = "tests/unit/router/test_body.py::test_a_bad_chat_body_is_a_400_that_names_the_field"
_GRPC = "tests/unit/common/test_grpc.py"

MUTANTS = (
    Mutant(
        "bear-any-depth",
        f"{_ROUTER}/core/shape.py",
        "for _ in range(MAX_DEPTH):",
        "for _ in range(10 * MAX_DEPTH):",
        (_BODIES,),
    ),
    Mutant(
        "bear-any-number-of-objects",
        f"{_ROUTER}/core/shape.py",
        "if count > MAX_NESTED:",
        "if count < 0:",
        (_BODIES,),
    ),
    Mutant(
        "record-errors-in-spans",
        f"{_COMMON}/tracing.py",
        "end_on_exit=True, record_exception=False",
        "end_on_exit=True, record_exception=True",
        (f"{_GRPC}::test_an_unknown_exception_is_told_to_no_span",),
        fixtures=True,
    ),
    Mutant(
        "believe-any-details",
        f"{_COMMON}/status.py",
        "except (ValueError, DecodeError):",
        "except ValueError:",
        (f"{_GRPC}::test_details_that_somebody_on_the_way_garbled_are_left_out",),
    ),
    Mutant(
        "follow-the-engine-elsewhere",
        f"{_AGENT}/engine_requests.py",
        "allow_redirects=False",
        "allow_redirects=True",
        ("tests/contract/test_owner_requests.py::test_a_server_cannot_send_prompt_and_key_elsewhere",),
    ),
)
