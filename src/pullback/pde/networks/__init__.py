"""Networks for PDEs, and the choice of one for a problem."""
