"""What the connector costs an engine's scheduler loop: per step, per turn, and in its longest moment."""
