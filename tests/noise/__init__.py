"""Sources and levels of noise."""
