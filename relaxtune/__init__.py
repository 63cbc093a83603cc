"""From an ONNX transformer to a tuned, validated shared library, on Apache TVM Relax."""
