"""Passes for symbolic sizes: what is known of them, positions counted along them, copies and moves at any size."""
