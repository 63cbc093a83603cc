"""Questions people ask of the tuning database; the answers are frozen values."""
