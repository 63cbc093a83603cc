"""Side-by-side runs against peers; run them as `python -m benchmarks.ROOM.NAME` from the repository's root."""
