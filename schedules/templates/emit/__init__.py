"""The vocabulary of kernels: frame, copies, barriers, multiplications, registers, sums, epilogues."""
