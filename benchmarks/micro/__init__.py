"""One layer at a time under pytest-benchmark: `make bench-micro`."""
