"""Backhaul's router: runs each turn over the prefill and the decode engine."""
