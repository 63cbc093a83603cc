"""Many models in one run: a plan in TOML, its cells, what they share, what they cost, and their artifacts."""
