"""The attention template for GPUs from Ampere on without wgmma: cp.async, ldmatrix, mma; start at `template.py`."""
