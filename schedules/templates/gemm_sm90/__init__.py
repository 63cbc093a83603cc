"""The GEMM template for Hopper (sm_90a): TMA, mbarriers and wgmma; start at `template.py`."""
