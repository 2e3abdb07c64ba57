"""Networks trained again on halves of their data, and how well scores predict them."""
