"""The GEMM template for GPUs from Ampere on without wgmma: cp.async, ldmatrix and mma.sync; start at `template.py`."""
