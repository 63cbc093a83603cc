"""The dashboard: pages of a tuning database that stay open in a browser and keep up with what happens."""
