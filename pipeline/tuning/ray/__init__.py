"""Building and measuring on a Ray cluster."""
