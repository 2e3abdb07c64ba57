"""From a problem to a loss: points, residuals there, terms of the loss and their weights."""
