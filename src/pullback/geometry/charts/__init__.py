"""Other coordinates for the same functions: reparametrizations, affine twins, neurons."""
