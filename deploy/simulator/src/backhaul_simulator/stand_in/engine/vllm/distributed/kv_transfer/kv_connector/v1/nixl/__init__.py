"""Stand-in for the package of vLLM."""
