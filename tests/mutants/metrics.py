"""Mutants of what is counted: labels without an end, and whoever may read them."""

from tests.mutants.mutant import Mutant

_COMMON = "services/common/src/backhaul_common"
_METERING = f"{_COMMON}/metering.py"


def _metering(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/common/test_metering.py::{name}" for name in names)


MUTANTS = (
    Mutant(
        "count-whatever-is-said",
        _METERING,
        "return text if text in label.values else OTHER",
        "return text",
        _metering("test_whatever_is_said_no_label_says_more_than_was_declared"),
        fixtures=True,
    ),
    Mutant(
        "name-any-number-of-models",
        _METERING,
        "if len(names) < MOST_NAMES:",
        "if True:",
        _metering("test_names_that_the_operator_gives_are_bounded"),
        fixtures=True,
    ),
    Mutant(
        "remember-what-is-refused",
        _METERING,
        "                bounded, {label",
        "                texts, {label",
        _metering("test_what_is_refused_as_a_label_is_not_remembered"),
        fixtures=True,
    ),
    Mutant(
        "name-models-that-nobody-serves",
        "services/router/src/backhaul_router/observing.py",
        "model if self._serves(model) else OTHER",
        "model",
        ("tests/unit/router/test_observing.py::test_a_model_that_no_node_serves_is_named_nowhere",),
        fixtures=True,
    ),
    Mutant(
        "show-metrics-to-anybody",
        f"{_COMMON}/exposition.py",
        "context = ListenerContext(self._tls).front if self._tls else None",
        "context = None",
        (
            "tests/unit/common/test_exposition.py::"
            "test_over_tls_whoever_has_a_certificate_of_the_services_reads_and_nobody_else",
        ),
        fixtures=True,
    ),
)
