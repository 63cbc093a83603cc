"""The stages from an ONNX graph to a tuned, validated artifact; `jobs.py` joins them."""
