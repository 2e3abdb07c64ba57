"""How good a solution is: residuals at fresh points, errors, verdicts, tables and pictures."""
