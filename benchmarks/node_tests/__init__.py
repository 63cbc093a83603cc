"""ONNX's own backend node tests through our import and compilation, beside stock TVM's; see `onnx_node_tests`."""
