"""What is held for every block: averages of its factors, damping, and the preconditioner."""
