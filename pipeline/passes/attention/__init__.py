"""Passes that find attention and make it one kernel: scores, masks, heads, rotary embeddings, caches."""
