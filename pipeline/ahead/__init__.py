"""Kernels that other processes make while a model is compiled."""
