"""The table of compatibility: tools, their features, and what becomes of them."""
