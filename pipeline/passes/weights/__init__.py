"""Passes over constants: folding, lifting, packing, turning and quantising weights."""
