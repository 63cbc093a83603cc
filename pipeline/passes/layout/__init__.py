"""Passes that combine matmuls and remove reshapes, transposes and copies."""
