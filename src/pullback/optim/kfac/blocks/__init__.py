"""What is held: averages of the statistics, blocks for every parameter, damping and inverses."""
