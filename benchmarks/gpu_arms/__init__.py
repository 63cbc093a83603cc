"""The arms of `benchmarks.bench_gpu`: one model, batch and sequence, run by relaxtune and by its peers on one GPU."""
