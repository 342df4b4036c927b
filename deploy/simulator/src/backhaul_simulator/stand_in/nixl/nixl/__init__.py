"""Stand-in for NIXL."""
