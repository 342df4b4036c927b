"""Fixed random histories of claims; ``python -m tests.model`` plays other ones."""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.model.machine import ClaimsMachine

ClaimsMachine.TestCase.settings = settings(
    # A mutant has more of them to show itself in, and ends at the first.
    max_examples=int(os.environ.get("BACKHAUL_HISTORIES", "500")),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestClaims = pytest.mark.timeout(600)(ClaimsMachine.TestCase)
