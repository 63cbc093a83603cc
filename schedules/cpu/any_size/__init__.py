"""Kernels of symbolic size on a CPU, written loop by loop: no primitive of a schedule cuts a symbolic loop well."""
