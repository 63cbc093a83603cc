"""Templates for memory-bound functions: reductions over rows (`template.py`) and elementwise (`elementwise.py`)."""
