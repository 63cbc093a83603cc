"""Calls of loaded modules on GPUs: whose turn it is, on which stream, and CUDA graphs of sizes that come again."""
