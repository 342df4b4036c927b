"""What engines are worth for a leg: one module for each scorer."""
