"""Orbits at a point: verification, tangents and rank."""
