"""Artifacts after the tune: runtimes, gate, refit, rebuild."""
