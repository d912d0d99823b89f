"""Other libraries, driven as their users drive them."""
