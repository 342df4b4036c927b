"""Checks: each is a function of a snapshot to findings, grouped by subject."""
