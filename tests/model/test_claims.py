"""Fixed random histories of claims; ``python -m tests.model`` plays other ones."""

import pytest
from hypothesis import settings

from tests.model.machine import ClaimsMachine

ClaimsMachine.TestCase.settings = settings(
    max_examples=500, stateful_step_count=50, deadline=None, derandomize=True, report_multiple_bugs=False
)
TestClaims = pytest.mark.timeout(600)(ClaimsMachine.TestCase)
