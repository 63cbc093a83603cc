"""Processes of this machine that answer requests, may be killed at any moment, and start in milliseconds."""
