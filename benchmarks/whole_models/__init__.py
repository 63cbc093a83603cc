"""Whole models: their latency, kernels and results."""
