"""A model of the life of claims: real cores wired together without I/O, and a world that does its worst to them.

`machine` says what can happen, `truth` what must never happen; neither asks the code under test. `engine` and `prefill`
are the two sides of a read, `agent` is one process beside the decode engine, `etcd` what the registry keeps, and `world`
puts them together and lets time pass. ``make test`` plays fixed histories (`test_claims`); ``python -m tests.model``
plays random ones for as long as it is told.
"""
