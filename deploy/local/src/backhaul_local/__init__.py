"""Runs a whole Backhaul stack on one machine."""
