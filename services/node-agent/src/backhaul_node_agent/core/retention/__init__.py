"""What is retained, how long, and at whose cost: pure rules and the figures that they go by."""
