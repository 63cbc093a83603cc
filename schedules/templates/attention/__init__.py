"""What kernels of attention share: which tiles a block makes, masks and the online softmax on registers, sizes."""
