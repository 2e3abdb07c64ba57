"""Laws that a metric, a Gram or a solver, ours or yours, can be held to."""
