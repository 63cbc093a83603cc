"""Passes for symbolic sizes: values that are the same at all of them, positions, copies and moves."""
