"""Group actions that the books of a walk suggest."""
