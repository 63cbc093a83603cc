"""Whether a build may take the place of another: latency, drift, size, memory, compile time, validation."""
