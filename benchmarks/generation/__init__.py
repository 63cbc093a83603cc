"""Tokens: sampling, and generation as a user calls it."""
