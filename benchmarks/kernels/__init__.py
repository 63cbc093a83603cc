"""Kernels beside vendors' libraries and the limits of a GPU."""
