"""Programs that Opacus's users call by module path."""
