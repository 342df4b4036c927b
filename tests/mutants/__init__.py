"""Mutants: changes to the code that break an invariant, and the tests that must fail for each of them.

Run all with ``python -m tests.mutants``, some with ``python -m tests.mutants NAME...``.
"""
