"""Fixed random histories of claims; `python -m tests.model` plays other ones."""

from hypothesis import settings

from tests.model.machine import ClaimsMachine

ClaimsMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True)
TestClaims = ClaimsMachine.TestCase
