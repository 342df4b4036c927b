"""What each retention policy would save on a trace of turns, in virtual time on the simulated engine's memory."""
