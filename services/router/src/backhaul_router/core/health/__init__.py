"""Which nodes and pairs are well, and what may be repeated: pure, from what legs came to."""
