"""What a model does with its parameters, as capture sees it: uses, rows, substitution, decisions."""
