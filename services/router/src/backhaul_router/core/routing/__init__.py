"""Which engines serve a turn, and by which route: pure, over what is known at this moment."""
