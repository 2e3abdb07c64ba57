"""What every experiment shares: items, stores, runs, checks, verdicts and plots."""
