"""Tests of what surrounds the clipper: optimizer, virtual steps, loaders, accounting, checkpoints."""
