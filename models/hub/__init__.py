"""Models by name: folders and repositories in the hub's layout become ONNX files, cached by their content."""
