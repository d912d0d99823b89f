"""Other libraries that train models: one file for each, imported by name when it is used."""
