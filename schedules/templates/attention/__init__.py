"""Shared parts of the kernels of attention: tiles of a block, masks and the online softmax on registers, sizes."""
