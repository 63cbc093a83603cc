"""The attention template for Hopper (sm_90a): one kernel with an online softmax; start at `template.py`."""
