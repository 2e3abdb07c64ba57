"""What every stage shares: parameter coordinates, capture, random state, numerics, errors."""
