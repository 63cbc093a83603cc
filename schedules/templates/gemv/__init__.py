"""Templates for matmuls of up to 16 rows: start at `template.py`."""
