"""Orbits at a point: verification, tangents, rank and invariants."""
