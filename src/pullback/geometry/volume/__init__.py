"""How much room a minimum has, measured in function space."""
