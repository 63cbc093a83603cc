"""Measurements: requests, arguments, timing, checks of results, causes of failure."""
