"""ONNX Runtime in a process of its own: a graph that ends it, or that it never finishes, ends no command."""
