"""A model's call as a graph, rules for its operations, and the symmetries that it suggests."""
