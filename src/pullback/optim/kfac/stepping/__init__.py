"""What is done with it: when to learn and to invert, and how parameters move."""
