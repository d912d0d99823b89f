"""The quality and the speed of noise, on billions of draws: `python -m benchmarks.noise`."""
