"""Parametric kernels: written once by hand, instantiated from a decision of a few numbers."""
