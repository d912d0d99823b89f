"""The private step as one graph."""
