"""Templates for matmuls of up to 16 rows: `template.py`, and `stream.py` with weights that go through shared memory."""
