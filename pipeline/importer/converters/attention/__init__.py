"""Converters of attention operators, their heads, caches and rotary embeddings."""
