"""Each kernel beside its twin on a GPU: `python -m benchmarks.kernels`."""
