"""Kernels, in Triton's interpreter and on a GPU, and their twins."""
