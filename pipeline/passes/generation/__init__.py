"""A decoder's graph as a step of generation: caches, position and tokens are state that it updates in place."""
