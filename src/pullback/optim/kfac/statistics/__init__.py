"""What is measured: forward passes recorded, covectors pulled back, sums for every block."""
