"""The artifact: compile, export, manifest, shape buckets, and the runtime that loads it."""
