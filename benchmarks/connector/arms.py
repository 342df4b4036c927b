"""What is compared: vLLM's own connector, and Backhaul's beside agents of every manner."""

STOCK = "stock"
AGENTS = {"present": "reads", "slow": "stalls", "absent": ""}
"""Arms with Backhaul's connector, and what its agent does; nothing: there is none."""
