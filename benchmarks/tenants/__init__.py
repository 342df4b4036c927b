"""Measures whether the time of an answer tells one tenant of another's conversations."""
