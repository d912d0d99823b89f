"""Families of timm's models: what has to be replaced in each, and whether its clipped sums are exact afterwards."""
