"""Alembic migrations of the tuning database, packaged with it."""
