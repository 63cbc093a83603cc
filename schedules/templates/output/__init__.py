"""From accumulators of tensor-core instructions to the output of a matmul: epilogues, shares, writing of tiles."""
