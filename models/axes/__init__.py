"""Sizes of symbolic axes: what a graph says of them, and what an input's axes have in common."""
