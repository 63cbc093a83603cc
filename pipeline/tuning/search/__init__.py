"""Where candidates come from: evolutionary search, kernel templates, the cost models that order them."""
