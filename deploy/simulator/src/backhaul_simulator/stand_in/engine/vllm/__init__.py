"""Stand-in for vLLM: what Backhaul's connector imports of it, on the engine simulator."""

__version__ = "0.32.0"
