"""Pieces of kernels that several templates emit: copies, registers, barriers, fast math, the kernel frame."""
