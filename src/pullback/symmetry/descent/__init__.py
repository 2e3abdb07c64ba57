"""What an optimizer does on a slice at every step: directions, sweeps, transport of state."""
