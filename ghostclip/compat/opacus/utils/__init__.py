"""Tools around a private training loop."""
