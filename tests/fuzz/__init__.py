"""Fuzzing: every parser that meets bytes from outside is given bytes that nobody sends in earnest."""
