"""Vendor libraries as makers of kernels: a PrimFunc becomes one call of a library that is installed where it runs."""
