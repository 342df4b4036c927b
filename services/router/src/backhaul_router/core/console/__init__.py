"""What the console shows, as plain values: no I/O."""
