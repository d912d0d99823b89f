"""The table of the loops in `tests/loops`, and a random search for loops that get through."""
