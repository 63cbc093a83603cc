"""Converters of quantised operators: QDQ, QLinear, integer matmuls and convolutions."""
