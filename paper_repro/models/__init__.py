"""The published models, in plain PyTorch or built from a configuration of `transformers`, with random weights."""
