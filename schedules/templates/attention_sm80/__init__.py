"""The attention template for GPUs from Ampere on without wgmma: cp.async, ldmatrix, mma.sync; start at `template.py`."""
