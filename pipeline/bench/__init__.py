"""Latency of whole models: several arms side by side, and whether a difference is sure."""
