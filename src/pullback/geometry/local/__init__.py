"""One point of the parameter space: tangents, Gram, generalized inverses, projections, rank."""
