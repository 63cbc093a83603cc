"""The jobs that people run: compile and tune a model, validate and measure an artifact, inspect and explain."""
