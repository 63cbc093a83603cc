"""The tuning database and the dashboard over it."""
