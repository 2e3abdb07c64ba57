"""Ready problems from the literature, with networks and options that solve them."""
