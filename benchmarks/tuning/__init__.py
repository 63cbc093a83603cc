"""What tuning takes and what it gains."""
