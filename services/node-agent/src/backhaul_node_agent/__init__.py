"""Backhaul's node agent: single owner of what one vLLM server retains."""
