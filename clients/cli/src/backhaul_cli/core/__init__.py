"""What the command line knows and concludes, without I/O."""
