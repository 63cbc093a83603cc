"""One model at any sizes: its peers on a GPU, and streams of calls."""
