"""The arms of `benchmarks.whole_models.bench_gpu`: one model, batch and sequence, run by relaxtune and its peers."""
