"""Slices that meet orbits once: constraints, retractions, projections, bases."""
