"""The papers' figures as runnable experiments, and the demonstration."""
