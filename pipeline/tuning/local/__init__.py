"""Building and measuring on this machine, in processes that may be killed."""
