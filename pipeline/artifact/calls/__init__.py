"""Steps of a call before and after the module runs: checks, shape buckets, padding left out."""
