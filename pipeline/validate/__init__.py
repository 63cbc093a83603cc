"""Whether results are right: reference, tolerances, validation, drift, comparison of two builds."""
