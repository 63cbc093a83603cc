"""Work on the tokens that count alone: where they lie in tensors, and the packed form of a graph."""
