"""TIR functions of our own that Relax has no operator for: attention, and matmuls by quantised weights."""
