"""Which engines may, and which should, serve a leg: one module for each filter."""
