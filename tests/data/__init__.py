"""Samplers, loaders and physical batches: what is delivered is what was drawn."""
