"""A model's call as a graph, and a walk along it that keeps books on scales and readers."""
