"""What is measured: forward passes watched, covectors pulled back, sums for every block."""
