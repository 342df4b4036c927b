"""A model of the life of claims: real cores wired together without I/O, and a world that does its worst to them.

`machine` says what can happen, `truth` what must never happen; neither asks the code under test. `engine` and `prefill`
are the two sides of a read, `link` and `agent` what stands between the decode engine and a claim, `etcd` what the
registry keeps; `world` puts them together and lets time pass. ``make test`` plays fixed histories (`test_claims`), and
``python -m tests.model`` plays other ones for as long as it is told.
"""
