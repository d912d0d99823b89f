"""Everything that needs a GPU, by one command: `python -m benchmarks.gpu`."""
