"""Ready problems with their standard set-ups, exact solutions and hard constraints."""
