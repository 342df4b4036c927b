"""Time to the first token on real engines: one-way P/D beside Backhaul, in one run."""
