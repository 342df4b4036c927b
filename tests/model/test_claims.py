"""Fixed random histories of claims; ``python -m tests.model`` plays other ones."""

import pytest
from hypothesis import HealthCheck, settings

from tests.model.machine import ClaimsMachine

ClaimsMachine.TestCase.settings = settings(
    max_examples=500,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestClaims = pytest.mark.timeout(600)(ClaimsMachine.TestCase)
