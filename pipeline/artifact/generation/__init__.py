"""Tokens from an artifact that owns the caches of its decoder."""
