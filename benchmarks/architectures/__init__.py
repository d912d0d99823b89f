"""Known architectures, each clipped by ghostclip and by Opacus: `python -m benchmarks.architectures`."""
