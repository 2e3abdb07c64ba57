"""A PDE problem: its fields, the conditions that must hold, and the domain where they hold."""
