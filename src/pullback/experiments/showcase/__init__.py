"""The races that the demonstration runs and draws."""
