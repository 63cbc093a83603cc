"""Passes that find norms and take them into the matmuls around them."""
