"""Backhaul's command line."""
