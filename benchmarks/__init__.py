"""Measurements of the whole system, each in a package of its own."""
