"""Other libraries that a model is timed beside, each in a process of its own; the worker's files need no TVM."""
