"""Passes that carry a precision policy out: half precision, int8, tf32, float32 sums."""
