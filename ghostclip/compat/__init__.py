"""Other libraries' interfaces, for scripts that were written for them."""
