"""What the commands of `pullback` do."""
