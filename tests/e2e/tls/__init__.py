"""A whole stack under TLS."""
