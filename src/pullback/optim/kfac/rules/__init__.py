"""Direction rules: how a gradient becomes a direction, from the factors of its block."""
