"""An experimental GEMM template for tcgen05 (sm_100a), which has never run; start at `template.py`."""
